"""The audit: does a measure survive what leaves the function alone?"""

from spiritlevel.audit.audit import audit
from spiritlevel.audit.findings import Audit, Finding, Trial

__all__ = ["Audit", "Finding", "Trial", "audit"]
