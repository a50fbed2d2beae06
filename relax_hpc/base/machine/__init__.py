"""Facts of a machine, and the minimum requirements that they have to meet.

`env/setup.sh` runs this package before anything is installed, with any Python from 3.6 on: it
imports only the standard library and itself, the latter relatively.
"""
