"""`python -m miniinfer.cli` is the command `miniinfer`."""

import sys

from . import main

sys.exit(main())
