"""`python -m treering COMMAND ...`."""

import sys

from treering import console_script

sys.exit(console_script())
