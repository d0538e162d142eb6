"""Imported first thing by Python's fork server, and by nothing else.

A signal to the runner's whole group (`timeout oelm run`, a scheduler's end of a job, a closed
terminal) must reach the runner alone, which lets every trainer save. A fork server that died of it
would leave the trainers without anybody to stop them.
"""

import os

os.setsid()
