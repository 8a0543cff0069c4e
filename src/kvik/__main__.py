"""`python -m kvik` is the `kvik` command."""

import sys

from kvik.cli.main import main

sys.exit(main())
