"""``python -m inro_fx`` is the command ``inro-fx``."""

import sys

from .cli import main

sys.exit(main())
