"""Chat templates that would take all time or all memory there is. Clients may send `n` and messages; templates come with models."""

from __future__ import annotations

_TREE = "{% set ns = namespace(l=['ab']) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"

# Nothing of these is counted by steps: each is one call of Python's.
BYTES = {
    "ljust": "{{ 'a'.ljust(n * 1000000) }}",
    "rjust": "{{ 'a'.rjust(n * 1000000) }}",
    "zfill": "{{ '1'.zfill(n * 1000000) }}",
    "center": "{{ 'a'.center(n * 1000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(n * 1000000) }}",
    "replace": "{% set s = 'a' * 1000000 %}{{ s.replace('a', 'b' * n) }}",
    "join": "{% set s = 'a' * 1000000 %}{{ s.join('b' * n) }}",
    "the filter center": "{{ 'a' | center(n * 1000000) }}",
    "the filter indent": "{{ ('a\n' * 1000000) | indent(n) }}",
    "the filter replace": "{% set s = 'a' * 1000000 %}{{ s | replace('a', 'b' * n) }}",
    "the filter join": "{{ ('b' * n) | join('a' * 1000000) }}",
    "the filter format": "{{ ('%' ~ (n * 1000000) ~ 's') | format('a') }}",
    "the operator %": "{{ ('%' ~ (n * 1000000) ~ 'd') % 1 }}",
    "the method format": "{{ ('{:' ~ (n * 1000000) ~ '}').format('a') }}",
    "~ in a loop": "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "blocks": "{% set a %}{{ 'a' * 1000000 }}{% endset %}"
    + "".join(f"{{% set {b} %}}{('{{ ' + a + ' }}') * 8}{{% endset %}}" for a, b in zip("abcdef", "bcdefg", strict=True)),
    "lists": "{% set ns = namespace(l=[1]) %}{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "batch": "{{ [1] | batch(n * 1000000, 'x') | list }}",
    "lipsum": "{{ lipsum(n=n * 1000) }}",
    "a tree written out": f"{_TREE}{{{{ ns.l }}}}",
    "a tree as JSON": f"{_TREE}{{{{ ns.l | tojson }}}}",
    "kept texts": "{% set ns = namespace(l=[]) %}{% for i in range(n) %}{% set ns.l = ns.l + ['a' * 4000000 ~ i] %}{% endfor %}",
}

TIME = {
    "a tree compared": "{% set ns = namespace(l=[1], m=[1]) %}{% for i in range(60) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ ns.l == ns.m }}",
    "a tree as a key": "{% set ns = namespace(l=(1,)) %}{% for i in range(60) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ {ns.l: 1} }}",
    "long numbers": "{% set ns = namespace(x=7) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "long divisions": "{% set x = 7 ** 9000000 %}{{ x // (7 ** 4500001) % 2 }}",
}

# Steps end these, the same way each time.
STEPS = {
    "nested loops": "{% set l = range(3000) | list %}{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}{% endfor %}",
    "loops over a text": "{% set l = 'a' * n %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "loops in loops of ranges": "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}",
    "a loop that calls itself": "{% for x in [1, 2, 3] recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "output": "{% set l = range(3000) | list %}{% for a in l %}{% for b in l %}x{% endfor %}{% endfor %}",
}
