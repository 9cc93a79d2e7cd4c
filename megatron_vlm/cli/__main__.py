"""`python -m megatron_vlm.cli`."""

import sys

from megatron_vlm.cli import main

sys.exit(main())
