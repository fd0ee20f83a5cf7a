"""One runner for all miniatures: arms, their jobs side by side, tables, curves and pages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
