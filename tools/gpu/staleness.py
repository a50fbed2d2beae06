"""What a step takes when actor and engine take turns, at staleness 0 and at 1: real engine, real shape, this machine.

The model has random weights; what is drawn means nothing, how long it takes does. The runs are those of the quickstart
in `tools/bench/modes.py`, with another model. On one GPU all groups share it, and staleness 1 gains what is left over.

    python tools/gpu/staleness.py --json
    python tools/gpu/staleness.py --device cpu --small
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from found import has, version
from shapes import hf_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools/bench"))

from convergence import run  # noqa: E402
from modes import measured  # noqa: E402

from relax_hpc.data.tiny_model import BOS_ID, EOS_ID, PAD_ID, write_tokenizer  # noqa: E402
from relax_hpc.observe.report import report  # noqa: E402
from relax_hpc.rundir import RunDir  # noqa: E402

MODES = ("colocate", "0", "1")
COLUMNS = ["mode", "engine, s", "actor, s", "least possible, s", "step, s", "least / step", "of colocated"]
WARM_UP_STEPS = 3


def make_model(directory: Path, shape: str, device: str) -> None:
    """Random weights in bfloat16, and a tokenizer that has a token a character."""
    from relax_hpc.engines.transformers_hook import install_transformers_hook

    install_transformers_hook()
    from transformers import AutoConfig, AutoModelForCausalLM

    about = hf_config(shape) | {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    torch.manual_seed(0)
    config = AutoConfig.for_model(about["model_type"], **{k: v for k, v in about.items() if k != "model_type"})
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(about | {"torch_dtype": "bfloat16"}))
    write_tokenizer(directory)


def options(model: Path, device: str, small: bool) -> list[str]:
    """Over the quickstart's."""
    sizes = (4, 8) if small else (16, 512)
    flags = {"max_total_tokens": 16384 if small else 262144, "mem_fraction_static": 0.1 if small else 0.4}
    found = [
        "--model.path",
        str(model),
        "--model.device",
        device,
        "--model.dtype",
        "bfloat16",
        "--warm_start.steps",
        "0",
    ]
    found += ["--prompts_per_step", str(sizes[0]), "--rollout.max_new_tokens", str(sizes[1])]
    return found + [word for key, value in flags.items() for word in (f"--rollout.engine.flags.{key}", str(value))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny shape and a few steps")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    if lacking := [name for name in ("sglang", "transformers", "mpi4py") if not has(name)]:
        print(f"staleness: not measured: no {', '.join(lacking)}")
        return 0
    steps, shape, found, failed = (6, "tiny", [], 0) if args.small else (20, "0.6B", [], 0)
    with tempfile.TemporaryDirectory() as name:
        folder, base = Path(name), 0.0
        make_model(folder / "model", shape, args.device)
        for mode in MODES:
            try:
                path = run(folder / mode, mode, 0, steps, *options(folder / "model", args.device, args.small))
                line = measured(mode, report(RunDir(path), WARM_UP_STEPS)["pace"])
            except (subprocess.SubprocessError, KeyError) as error:
                said = (folder / f"{mode}.txt").read_text().splitlines()
                print(f"staleness: {mode} FAILED: {error}", *said[-5:], sep="\n")
                failed = 1
                continue
            base = base or line["step_s"]
            times = [f"{line[key]:.3f}" for key in ("generate_s", "train_s", "ideal_s", "step_s")]
            found.append([mode, *times, f"{line['ideal_share']:.2f}", f"{line['step_s'] / base:.2f}"])
            print(" | ".join(found[-1]), flush=True)
    if args.json:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        about = {"device": device, "shape": shape, "steps": steps, "sglang": version("sglang")}
        print(json.dumps({"columns": COLUMNS, "rows": found, "settings": about}))
    return failed


if __name__ == "__main__":
    sys.exit(main())
