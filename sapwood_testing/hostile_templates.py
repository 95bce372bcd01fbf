"""Chat templates that never end, or grow. Not for use outside of tests and benchmarks."""

from __future__ import annotations

DOUBLED = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
GROWN = "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x }}"

HOSTILE = {
    "tojson": DOUBLED + "{{ ns.x | tojson }}",
    "indented tojson": DOUBLED + "{{ ns.x | tojson(indent=2) }}",
    "str": DOUBLED + "{{ ns.x }}",
    "string": DOUBLED + "{{ ns.x | string | length }}",
    "pprint": DOUBLED + "{{ ns.x | pprint }}",
    "equality": DOUBLED + "{% set a = ns.x %}" + DOUBLED + "{{ a == ns.x }}",
    "order": DOUBLED + "{% set a = ns.x %}" + DOUBLED + "{{ a < ns.x }}",
    "membership": DOUBLED + "{% set a = ns.x %}" + DOUBLED + "{{ a in [ns.x] }}",
    "join": DOUBLED + "{{ ns.x | join(',') | length }}",
    "unique": DOUBLED + "{{ ns.x | map('string') | unique | list }}",
    "center": "{{ 'x' | center(10 ** 10) }}",
    "width": "{{ '%2000000000d' % 1 }}",
    "width of format": "{{ '%2000000000d' | format(1) }}",
    "method": "{{ 'x'.ljust(10 ** 10) }}",
    "format method": "{{ '{:2000000000}'.format(1) }}",
    "zfill": "{{ '1'.zfill(10 ** 10) }}",
    "repetition": "{{ 'x' * 10 ** 10 }}",
    "repetition of lists": "{{ ([1] * 10 ** 9) | length }}",
    "concatenation": GROWN.replace("EXPRESSION", "ns.x ~ ns.x"),
    "addition": GROWN.replace("EXPRESSION", "ns.x + ns.x"),
    "joining": GROWN.replace("EXPRESSION", "[ns.x, ns.x] | join"),
    "replacing": GROWN.replace("EXPRESSION", "ns.x | replace('a', 'aa')"),
    "indentation": "{{ ('a\n' * 100000) | indent(100000) }}",
    "wrapping": "{{ ('a ' * 3000000) | wordwrap(1, wrapstring='b' * 1000) | length }}",
    "batches": "{{ range(99999) | batch(1000000000, 0) | list | length }}",
    "slices": "{{ range(9) | slice(1000000000) | list | length }}",
    "capture": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "shift by division": "{{ (10 ** 4000000) // 7 % 10 }}{{ (7 ** 9999999) % 11 }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursion": "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "long text": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "sorting": "{% for i in range(99999) %}{{ range(99999) | sort(reverse=true) | length }}{% endfor %}",
    "sums": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "lorem": "{{ lipsum(n=1000000, html=false) | length }}",
}


def switched() -> str:
    """A template that does one of the hostile things if a variable says so."""
    cases = "".join(f"{{% if what == '{name}' %}}{source}{{% endif %}}" for name, source in HOSTILE.items())
    return cases + "{{ messages[0].content }}"
