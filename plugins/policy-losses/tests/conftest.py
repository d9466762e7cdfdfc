"""`losses_support` is shared by the tests of this plugin."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
