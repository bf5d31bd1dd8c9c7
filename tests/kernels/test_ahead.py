"""``python -m flightedl.kernels`` leaves nothing to compile."""

from flightedl.domain.model import optimizers as of_blocks
from flightedl.kernels import ahead, compiled, compiled_rows, rows


def test_every_rule_is_compiled_ahead():
    expected = set(compiled._RULES)
    assert {type(rule) for rule in ahead._FOR_BLOCKS} == expected - {of_blocks.AdamW, of_blocks.Delta}
    assert {type(rule) for rule in ahead._FOR_ROWS} == set(compiled_rows._RULES)


def test_similar_rules_share_a_compiled_loop():
    loop = {rule: compiled._RULES[rule](rule(lr=1.0))[0] for rule in (of_blocks.Adam, of_blocks.AdamW, of_blocks.SGD)}
    assert loop[of_blocks.AdamW] is loop[of_blocks.Adam]
    assert compiled._RULES[of_blocks.Delta](of_blocks.Delta())[0] is loop[of_blocks.SGD]


def test_machine_code_is_cached_until_a_kernel_file_changes():
    code = compiled_rows.row_kernel(rows.received)
    (signature,) = code.nopython_signatures
    assert code._cache._cache_file._source_stamp == compiled._stamp()
    assert code._cache.load_overload(signature, code.targetctx) is not None
    code._cache._cache_file._source_stamp += 1
    try:
        events: list[str] = []
        compiled.compiling_begins.set(lambda: events.append("it is compiled"))
        assert code._cache.load_overload(signature, code.targetctx) is None
        assert code._cache.load_overload(signature, code.targetctx) is None
        assert events == ["it is compiled"]
    finally:
        code._cache._cache_file._source_stamp -= 1
