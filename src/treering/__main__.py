"""`python -m treering COMMAND ...`."""

import sys

from treering import main

sys.exit(main())
