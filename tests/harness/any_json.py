"""Hypothesis strategies for the worst of JSON: NUL, lone surrogates, NaN, numbers of any size."""

from hypothesis import strategies as st

ANY_TEXT = st.text(st.characters(codec=None))
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
    max_leaves=20,
)
