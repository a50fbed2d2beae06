"""`relax-hpc convert`, for whoever looks for it beside the other tools.

python tools/convert_checkpoint.py runs/mine/checkpoints/i000001-step-000100 policy --verify digests
"""

import sys

from relax_hpc.commands.program import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
