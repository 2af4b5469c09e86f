"""What Python imports first in processes that tests start: torch is not there for them, as it is not for most users.

transformers would import it, which takes seconds and gigabytes. And garbage is collected as rarely as in the suite.
"""

import gc
import sys

sys.modules['torch'] = None
gc.set_threshold(50_000, 20, 20)
