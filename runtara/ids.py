"""What is allowed in an id, in one place.

Rules:

1. An id is 1 to `MAX_ID_LENGTH` characters of Unicode text.
2. No control characters (C0, DEL, C1; so no NUL, no newline, no escape) and no lone surrogates. Everything
   else is allowed and kept as it is: ``/``, spaces, ``..``, ``%2F``. Nothing is normalised: composed and
   decomposed letters make different ids.
3. A checkpoint id or signal key does not start with ``~``: that prefix names the waits that have no
   checkpoint.
"""

import re
from typing import Final, NewType

from runtara.errors import ValidationError

TenantId = NewType("TenantId", str)
InstanceId = NewType("InstanceId", str)
CheckpointId = NewType("CheckpointId", str)
SignalKey = NewType("SignalKey", str)
RequestId = NewType("RequestId", str)

MAX_ID_LENGTH: Final = 512
RESERVED_PREFIX: Final = "~"

FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_id(value: object, field: str) -> str:
    """Return ``value`` if it is a well-formed id.

    Raises:
        ValidationError: Naming ``field`` and the rule that was broken.
    """
    if not isinstance(value, str):
        raise ValidationError(field, f"must be text, not {type(value).__name__}")
    if not value:
        raise ValidationError(field, "must not be empty")
    if len(value) > MAX_ID_LENGTH:
        raise ValidationError(field, f"is {len(value)} characters long, the limit is {MAX_ID_LENGTH}")
    bad = FORBIDDEN.search(value)
    if bad is not None:
        raise ValidationError(
            field, f"holds the forbidden character U+{ord(bad.group()):04X} at position {bad.start()}"
        )
    return value


def check_name(value: object, field: str) -> str:
    """Return ``value`` if it is a well-formed checkpoint id or signal key (rule 3 as well).

    Raises:
        ValidationError: Naming ``field`` and the rule that was broken.
    """
    name = check_id(value, field)
    if name.startswith(RESERVED_PREFIX):
        raise ValidationError(field, f"must not start with {RESERVED_PREFIX!r}, which is reserved")
    return name


def check_tenant_id(value: object) -> TenantId:
    return TenantId(check_id(value, "tenant_id"))


def check_instance_id(value: object) -> InstanceId:
    return InstanceId(check_id(value, "instance_id"))
