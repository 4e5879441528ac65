"""Formats of strings: those that llguidance follows as the standard means them, and patterns for others.

A format that is in neither is a note for the reader, as the standard has it.
"""

from __future__ import annotations

FOLLOWED = frozenset({"duration", "hostname", "ipv4", "ipv6", "uuid", "uri"})

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_ZONE}"

_PLAIN = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_REST = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*"
_ABSOLUTE = rf"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9.-]+(?::[0-9]{{1,4}})?(?:/{_PLAIN}*)*"
_REFERENCE = rf"^(?:{_ABSOLUTE}|{_PLAIN}*(?:/{_PLAIN}+)*/?)(?:\?{_REST})?(?:#{_REST})?$"

_VARIABLE = r"[A-Za-z0-9_]+(?:\*|:[1-9][0-9]{0,3})?"
_TEMPLATE = rf"^(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
# At most 64 characters before the @, and 253 behind it.
_EMAIL = rf"^{_ATOM}(?:\.?{_ATOM}){{0,31}}@{_LABEL}(?:\.{_LABEL}){{1,6}}$"

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "uri-template": _TEMPLATE,
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
}
"""Narrower than the standard where that keeps them short: no leap seconds, no year 0, no user in an address, no quoted
names in e-mail addresses."""
UUID = "^[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$"
SAME = {"iri": "uri", "idn-hostname": "hostname"}
