"""Where the kernels' cases run: on the GPU if there is one, else in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, and by then another test of the session may have
imported it. So without a GPU the cases run in a pytest of their own, started by
`test_interpreted.py`; `TRITON_INTERPRET=1 pytest tests/kernels` shows them one by one.
"""

import os

import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = ["test_interpreted.py", "test_compiled.py"]
elif not torch.cuda.is_available():
    collect_ignore = ["cases"]
