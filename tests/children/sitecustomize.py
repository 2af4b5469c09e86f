"""What Python imports first in processes that tests start: torch is not there for them, as it is not for most users.

transformers would import it, which takes seconds and gigabytes.
"""

import sys

sys.modules['torch'] = None
