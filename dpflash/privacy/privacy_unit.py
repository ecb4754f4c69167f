"""Names of privacy units: what neighboring datasets differ in."""

from __future__ import annotations

# One entry of the dataset.
SAMPLE = "sample"
DOCUMENT = "document"
# Two rows, such as a chosen and a rejected answer.
PREFERENCE_PAIR = "preference pair"
# A person or another owner of several entries.
USER = "user"
# An owner who may share entries with others, where who owns which entry is public.
USER_OF_FIXED_GRAPH = "user, fixed graph"
