#!/usr/bin/env python3
"""Writes internal/tokenize/render/testdata/jinja.jsonl: small templates and what Jinja makes of them.

Needs Python 3.11 or newer with jinja2 3.1. The environment is set up as transformers sets up the one for chat templates.
Each line is {"template", "context" (JSON text), "rendered"} or, where Jinja fails, {"template", "context", "error"}.
"""
import json
import pathlib
import sys
from datetime import datetime

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime(2026, 12, 1, 12, 34, 56)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_support"), [], [], body).set_lineno(lineno)

    @jinja2.pass_eval_context
    def _support(self, context, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda fmt: NOW.strftime(fmt)
    return env


CONTEXT = {
    "s": "Hello, World", "e": "", "n": 7, "neg": -3, "f": 2.5, "whole": 1.0, "big": 12345678901234567890123456789,
    "t": True, "fa": False, "none": None, "l": [3, 1, 2], "el": [], "d": {"b": 1, "a": "x", "items": [1], "get": 5},
    "ed": {}, "nest": {"k": [1, {"z": None, "y": True}], "f": 1e16, "s": "it's \"q\" \\ \n é\u200b"},
    "u": "  \t pad é 漢字 😀 \n ", "html": "<a href=\"x\">&'</a>", "words": ["apple", "Banana", "cherry", "apple"],
    "rows": [{"name": "b", "v": 2, "on": True}, {"name": "A", "v": 1}, {"name": "c", "v": 3, "on": False}],
    "floats": [0.1, 1e-5, 1e22, -0.0, 100.0, 1e-4, 123456789.123, 5e-324, 1.7976931348623157e308],
    "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
}

EXPRESSIONS = r"""
s e n neg f whole big t fa none l el d ed nest u html words floats missing rows
s[0] s[-1] s[1:4] s[::-1] s[::2] s[-3:] s[:-1] s[5:2] s[100] s[:100] u[1:9] u[::-3]
l[0] l[-1] l[5] l[1:] l[::-1] l[::2] l[-2:] l[5:] l[:0] l[::-2]
(1,2,3)[1:] (1,) () (1,2)[0] [1,2]+[3] (1,)+(2,) [0]*3 3*[1,2] 'ab'*3 2*'x' 'x'*0 'x'*-1 [1]*0
n+1 n-10 n*n n/2 n//2 neg//2 neg%2 n%3 -n%3 2**10 2**-1 2**0.5 7.5//2 -7.5//2 7.5%2 -7.5%2 n/7 f+1 f*2 1/3 10/5 1e3 1.5e-7 0x10 0b11 1_000 1e100
big+1 big*2 -n +n t+1 t*3 t+t fa*5 n==7.0 1==True 1.0==1 '1'==1 none==fa
n>3 n>=7 1<2<3 3>2>2 'a'<'b' 'B'<'a' [1,2]<[1,3] n!=7 not_n n_in_l
7 in l|list 'Hello' in s 'x' in s 'b' in d 'zz' in d 2 in l 2 not in l 'apple' in words '' in s none in [none] 1 in [true] n in (7,8)
t and 'yes' fa or 'no' n and s none or e or 'z' not t not e not missing t if fa else n 'a' if t t if fa
s~n s~none s~t s~f s~l s~d s~missing e~e 1~2 none~'x' 1e16~'' whole~'' [none,true]~''
'%s'%s '%s-%d'%(s,n) '%5d|%-5d|%05d'%(n,n,n) '%.2f'%f '%x %X %o'%(255,255,8) '%r'%s '%s'%[1,'a'] '%%'%() '%(a)s %(b)s'%d '%e'%12345.678 '%g %g'%(1e-5,123456789) '%+d % d'%(3,3) '%c'%'x' '%5s|%-5s|'%('a','b') '%.1s'%'abc' '%s'%none '%s'%true '%i'%3.9
s|upper s|lower s|title 'hello-world foo_bar (baz)'|title s|capitalize 'éCOLE'|capitalize u|trim '..a..'|trim('.') s|length l|length d|length e|length u|length
l|first l|last s|first s|last el|first words|first l|sort l|sort(reverse=true) words|sort words|sort(case_sensitive=true) rows|sort(attribute='name')|map(attribute='name')|list rows|map(attribute='v')|list rows|map(attribute='on',default='?')|list rows|map(attribute='on')|list
rows|selectattr('on')|list rows|selectattr('on','defined')|map(attribute='v')|list rows|rejectattr('on')|map(attribute='name')|join(',') rows|selectattr('v','gt',1)|map(attribute='v')|list rows|selectattr('name','equalto','b')|list|length rows|selectattr('name','in',['b','c'])|map(attribute='name')|list l|select('odd')|list l|reject('odd')|list l|select|list [0,1,'',none]|select|list l|map('string')|list words|map('upper')|join(' ') l|map('string')|join words|map('replace','a','4')|list
l|sum rows|sum(attribute='v') l|max l|min words|max rows|max(attribute='v') words|unique|list ['a','A','b']|unique|list words|reverse|list s|reverse l|reverse|list l|join('-') l|join words|join(', ') rows|join(',',attribute='name') s|list d|list d|items|list d|dictsort d|dictsort(by='value') ed|dictsort d.items()|list d|dictsort(reverse=true)
words|batch(3)|list words|batch(3,'-')|list words|slice(3)|list words|groupby(0)|list rows|groupby('v')|list
'42'|int '4.9'|int 'x'|int 'x'|int(5) '0x1f'|int(base=16) '-7'|int 3.99|int t|int none|int ' 12 '|int '1_000'|int '2.5'|float 'x'|float 'x'|float(1.5) n|float none|float 'inf'|float
2.5|round 3.5|round 2.675|round(2) 2.5|round(method='ceil') -2.5|round(0,'floor') n|round 1234.5|round(-2) 2|round(2) 2.345|round(1,'ceil') neg|abs -2.5|abs
missing|default('x') none|default('x') none|default('x',true) e|default('x') e|default('x',true) e|d('y',boolean=true) missing|d missing.a|default('q') d.zz|default('q') missing|length missing|list missing|join missing|upper
s|replace('l','L') s|replace('l','L',1) 'aaa'|replace('','-') n|replace('7','8') s|string n|string none|string l|string f|string
html|e html|escape html|safe n|e s|e|safe html|striptags html|forceescape
d|tojson nest|tojson floats|tojson s|tojson u|tojson none|tojson t|tojson l|tojson(indent=2) nest|tojson(indent=4) d|tojson(sort_keys=true) u|tojson(ensure_ascii=true) d|tojson(separators=(',',':')) el|tojson(indent=2) ed|tojson(indent=2) (1,2)|tojson big|tojson "\u2028\u007f\b\f/"|tojson {'a':1,2:3,none:4,true:5,1.5:6}|tojson d|tojson(true) nest|tojson(false,2) d|tojson(indent='--')
'a\nb\nc'|indent 'a\nb\n\nc'|indent(2) 'a\nb'|indent(2,true) 'a\n\nb'|indent(2,first=true,blank=true) 'a\nb'|indent('>>') 'a\n'|indent
'hello world foo'|wordcount 'abc'|center(9) 'abc'|center(8) 'the quick brown fox jumps'|truncate(12) 'the quick brown fox jumps'|truncate(12,true) 'the quick brown fox jumps'|truncate(12,true,'') 'short'|truncate(3) 'the quick'|truncate(5,leeway=0)
'%s and %s'|format('a',2) '%(x)s'|format(x=1) '%.3f'|format(2.0) '{}'.format(1) '{} {}'.format('a',none) '{0}-{1}-{0}'.format(1,2) '{a}'.format(a=3) '{:>5}|{:<5}|{:^5}'.format('a','b','c') '{:.2f}'.format(3.14159) '{:05d}'.format(42) '{:,}'.format(1234567) '{!r}'.format('x') '{{}}'.format() '{0[a]}'.format(d) '{}'.format(1e16) '{}'.format([1,'a']) '{}'.format(true)
s.upper() s.lower() s.title() "they're bill's".title() s.capitalize() s.swapcase() u.strip() u.lstrip() u.rstrip() '..a.'.strip('.') 'xxabcxx'.lstrip('x') s.split(', ') s.split() ' a  b '.split() 'a,b,c'.split(',',1) 'a,b,c'.rsplit(',',1) ' a b c '.split(none,1) ' a b c '.rsplit(none,1) ''.split() ''.split(',') 'a,,b'.split(',') 'aXbXc'.split('X',maxsplit=1) 'a b'.split(sep=' ')
s.startswith('He') s.endswith('ld') s.startswith(('x','H')) s.startswith('e',1) s.endswith('o',0,5) s.find('o') s.find('zz') s.rfind('o') s.find('o',5) s.index('W') s.index('zz') s.count('l') s.count('') s.replace('l','') s.replace('l','_',1) s.replace('','.') ','.join(words) ''.join([]) ','.join(l) 'a\nb\r\nc\n'.splitlines() 'a\nb\n'.splitlines(true) 'abc'.partition('b') 'abc'.partition('x') 'abcb'.rpartition('b') 'abc'.removeprefix('a') 'abc'.removesuffix('c') 'abc'.removeprefix('x')
'abc'.center(8,'*') 'abc'.center(9,'*') 'abcd'.center(9,'*') 'abc'.ljust(5,'.') 'abc'.rjust(5) '42'.zfill(5) '-42'.zfill(5) 'a\tb'.expandtabs(4) 'ß'.casefold() 'ß'.upper() 'ǆ'.title() 'İ'.lower()
'abc'.isalpha() 'ab1'.isalnum() '12'.isdigit() '²'.isdigit() '²'.isdecimal() '½'.isnumeric() ''.isdigit() ' '.isspace() 'Ab'.istitle() 'AB'.isupper() 'ab1'.islower() 'a b'.isidentifier() 'é'.isascii() '漢字'.isalpha()
d.items() d.keys() d.values() d.keys()|list d.values()|list d.get('a') d.get('zz') d.get('zz',9) d.a d.b d['items'] d.get d['get'] ed.items() d.copy() d.items is_defined l.count(1) l.index(2) (1,1).count(1) l.copy() l.append(4) d.update({'z':1}) d.pop('a')
d.items|string is_x ed['items'] is_y
range(5)|list range(2,8,3)|list range(5,0,-2)|list range(0)|list range(3)[1] range(5)|length range(10)[2:4]|list range(3)
dict(a=1,b=2) dict(d,z=1) dict([('a',1)]) dict() namespace(a=1).a joiner(',')() {'a':{'b':[1,2]}} {'a':1}.a {1:'x'}[1] [1,[2,[3]]] {'x':none,'y':true,'z':1.0}
"a" "b" 'a\tb' 'a\\nb' '\x41\u00e9\U0001F600' '\101' '\d\w' 'a\
b' "it's" 'say "x"' ['it\'s "q"'] ["it's"] ['\n\t\\\x00\x7f\xa0\u200b\ud7ff'] ['é漢😀\u0301']
s is string n is string l is iterable s is iterable d is iterable n is iterable l is sequence s is sequence d is sequence missing is sequence d is mapping l is mapping n is number t is number f is float n is integer t is integer whole is integer t is boolean none is none missing is none missing is defined d.zz is defined d.a is defined n is odd n is even n is divisibleby(7) n is divisibleby 7 s is lower 'abc' is lower 'ABC' is upper t is true fa is false n is true 1 is sameas(1) none is sameas none n is eq 7 n is gt(3) n is in [7] 'upper' is filter 'odd' is test range is callable s is callable d is not mapping s is not string raise_exception is defined strftime_now is defined n is not defined not n is defined (1,2) is iterable n is ne 7 n is le 7 s is escaped
strftime_now('%Y-%m-%d') strftime_now('%d %B %Y, %A %H:%M:%S %p %j %U %W %y %b %a %I %e %-d %f %%') strftime_now('%c|%x|%X|%D|%F|%T|%R|%G-W%V-%u|%w|%s'[:-3])
s|upper|lower|title s.split(', ')[1].upper() (s|length + n) * 2 -n|abs (-n)|abs -f **2 2**3**2 1+2*3-4/2 not n == 7 not (n == 7) 1 if n else 2 if t else 3 [x_ for_list] n.real n.bit_length()
none.x none['x'] none|length missing.x missing['x'] missing() n.x n['x'] s.foo s['foo'] l.foo l['foo'] t.x missing+1 none+1 s+1 s+none 1+'a' l+1 l+'a' [1]+(2,) d+d none[0] missing[0] n[0] n() s() [1,2,3].foo() -s
1 in 5 'a' in none 'a' in missing 5 in 'abc' none|list n|list 5|first missing|first none|join
l|random|string|length 'a b'|urlencode {'a':1}|xmlattr 1000000|filesizeformat d|pprint [1,2]|attr('x') d|attr('a') s|attr('upper')
messages[0]['role'] messages[-1].content messages[1:]|length messages[::-1][0].role messages|map(attribute='role')|join(',') messages|selectattr('role','equalto','user')|first messages|selectattr('role','eq','user')|list|length (messages|first).role messages[0].get('name','n') messages[0].role == 'system' messages|length > 2 and messages[0].role
lipsum(1)|length>0 cycler('a','b').next() 'a'|e~'<' ('<'|e)~'<' '<'|safe~'<' ('a'|safe)+'<' html|e|length
s if s is defined and s is not none else 'x' (d.zz|default({})).get('a') (missing or {}).a (missing|default([]))|length [missing]|length [none,missing]|tojson missing|tojson
"a,b"|split(',') 'abc'|count l|count d|count 3|string*2 '3'*2 'é'|length '😀'|length '😀'[0] 'e\u0301'|length
1.0 1.10 100.0 1e5 1e15 1e16 1e17 123456789012345680.0 0.0001 0.00001 1.0e-10 -0.0 0.1+0.2 1e400 -1e400 3.0*2 10//3.0 5.0//2 1_0.5
true false True False None none TRUE
""".strip("\n")

TEMPLATES = [
    # Scopes.
    "{% set x = 1 %}{% for i in [1,2] %}{{ x }}{% set x = i + 10 %}{{ x }}{% endfor %}{{ x }}",
    "{% for i in [1,2,3] %}{{ y is defined }}{% set y = i %}{% endfor %}",
    "{% if true %}{% set z = 5 %}{% endif %}{{ z }}",
    "{% set ns = namespace(a=0, l=[]) %}{% for i in l %}{% set ns.a = ns.a + i %}{% set ns.l = ns.l + [i * 2] %}{% endfor %}{{ ns.a }} {{ ns.l }}",
    "{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set (a, b) = (1, 2) %}{{ b }}", "{% set x %}cap {{ n }}{% endset %}[{{ x }}]{{ x|length }}",
    "{% set x | upper | trim %} abc {% endset %}[{{ x }}]",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d|dictsort %}{{ loop.index }}{{ k }}{% endfor %}", "{% for k in d %}{{ k }}{% endfor %}",
    "{% for a, b in [(1, 2), [3, 4]] %}{{ a }}-{{ b }} {% endfor %}", "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    # Loops.
    "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }} {% endfor %}",
    "{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }} {% endfor %}", "{% for x in l %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for x in l %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }}{% endfor %}",
    "{% for x in el %}a{% else %}empty{% endfor %}", "{% for x in l if x > 1 %}{{ x }}{{ loop.index }}/{{ loop.length }}{% else %}none{% endfor %}",
    "{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in l %}{% for y in words %}{{ loop.index }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}{{ loop.index }};{% endfor %}",
    "{% for x in l recursive %}{{ x }}{% endfor %}", "{% for x in [[1,[2]],[3]] recursive %}[{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}]{% endfor %}",
    "{% for x in none %}{% endfor %}", "{% for x in missing %}a{% else %}b{% endfor %}", "{% for x in 5 %}{% endfor %}", "{% for c in s %}{{ c }}.{% endfor %}", "{% for c in u %}[{{ c }}]{% endfor %}",
    "{% for m in messages %}{% if loop.first and m.role == 'system' %}S{% elif m.role == 'user' %}U{% else %}A{% endif %}{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ loop.index0 }}{{ m.role }}{% endfor %}",
    "{% for i in range(3) %}{% set loop_i = loop.index %}{% for j in range(2) %}{{ loop_i }}{{ j }} {% endfor %}{% endfor %}",
    "{% for i in range(3) %}{{ i }}{% if not loop.last %}, {% endif %}{% endfor %}", "{{ loop is defined }}",
    "{% for x in l|sort %}{{ x }}{% endfor %}{% for x in l|reverse %}{{ x }}{% endfor %}", "{% for x in d.keys() %}{{ x }}{% endfor %}{% for x in d.values() %}{{ x }}{% endfor %}",
    "{% for x in (1,2) %}{{ x }}{% endfor %}{% for x in 1,2 %}{{ x }}{% endfor %}",
    # Macros.
    "{% macro m(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}|{{ m(1, c=3) }}|{{ m(1, 5, 6) }}|{{ m() }}|{{ m(c=1, a=2) }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}body {{ n }}{% endcall %}", "{% macro m() %}{{ caller(5) }}{% endmacro %}{% call(x) m() %}<{{ x }}>{% endcall %}",
    "{% macro f(x) %}{% if x > 0 %}{{ x }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(5) }}", "{% macro f(x) %}{{ x|tojson }}{% endmacro %}{{ f(d) }}{{ f(none) }}",
    "{% macro m(x) %}{{ x }}{% endmacro %}{% set y = m('a') %}{{ y is string }}{{ y|length }}{{ y ~ y }}{{ m.name }}", "{% macro m(x) -%}\n  {{ x }}\n{%- endmacro %}[{{ m(1) }}]",
    "{% set g = 1 %}{% macro m() %}{{ g }}{% endmacro %}{% set g = 2 %}{{ m() }}", "{% macro m() %}{{ n }}{% set n = 1 %}{{ n }}{% endmacro %}{{ m() }}{{ n }}",
    "{% macro a() %}A{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}", "{% macro m(l) %}{% for x in l %}{{ x }}{{ m(l[1:]) if l|length > 1 }}{% endfor %}{% endmacro %}{{ m([1,2,3]) }}",
    "{% macro m(x=none) %}{{ x is none }}{{ x }}{% endmacro %}{{ m() }}{{ m(missing) }}{{ m(x=0) }}", "{% macro m(x, y=x) %}{{ y }}{% endmacro %}{{ m(3) }}",
    "{% macro outer() %}{% macro inner(x) %}<{{ x }}>{% endmacro %}{{ inner(1) }}{% endmacro %}{{ outer() }}",
    # White space.
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  {%- if true %}\n  b\n  {%- endif %}\nc\n\n", "a {% if true -%}  b  {%- endif %} c", "  {{ n }}\n  {{- n }}\n{{ n -}}\n  x",
    "x {#- c -#} y", "x\n  {# c #}\ny", "x\n  {#- c #}\n  y", "x\n  {# c -#}\n  y", "{% set x = 1 %}\n\n{% set y = 2 %}\nz", "a\n\t{% set q = 1 %}\t\nb", "{%+ if true %} x{%+ endif %}",
    "a\n   {%+ if true %}\nb{% endif +%}\nc", "a  {%- set x = 1 -%}  b", "\n\n{{ n }}\n\n", "{{ n }}\n", "{{ n }}\n\n", "a\r\nb\r{{ n }}\r\n", "{%- raw %} {{ x }} {% endraw -%} y", "{% raw -%}  {{ x }}  {%- endraw %}", "a\n  {% raw %}\n {% x %}\n {% endraw %}\nb",
    "{{ '%}' }}{{ '}}' }}{# {{ #}{{ \"{#\" }}", "{{ {'a': {'b': 1}} }}", "{{{'a':1}['a']}}", "{{ {'a': [{'b': {}}]} }}", "{{ 1 }}{{ 2 }}", "  {% if true %}x{% endif %}  \n", "x{% if true %}\n\n{% endif %}y", "<{{-n-}}>", "a{{ '' }}\n{{ '' }}b", "{%if true%}a{%endif%}", "{%-if true-%} a {%-endif-%}",
    "\ufeffx{{ n }}", "x {{ n }}   \n   {% if t %}  \n   y  {% endif %}   z", "1{% set a = 1 %} {% set b = 2 %}  2", "a{% if t %} {% endif %}b", "a {{- ' ' -}} b", "a\n{%- for x in l -%}\n{{ x }}\n{%- endfor -%}\nb",
    # Blocks of other kinds.
    "{% filter upper %}abc{{ s }}{% endfilter %}", "{% autoescape true %}{{ html }}{% endautoescape %}", "{% autoescape false %}{{ html }}{% endautoescape %}", "{% generation %}x{{ n }}{% endgeneration %}", "{%- generation -%}  x  {%- endgeneration -%}  y", "{% generation %}{% set q = 1 %}{% endgeneration %}{{ q is defined }}", "a\n  {% generation %}\n  x\n  {% endgeneration %}\nb",
    "{% if n == 7 and not e %}1{% elif t %}2{% else %}3{% endif %}", "{% if missing %}1{% else %}2{% endif %}", "{% if missing is defined and missing.x %}1{% endif %}2", "{% if l %}1{% endif %}{% if el %}2{% endif %}{% if ed %}3{% endif %}{% if 0.0 %}4{% endif %}",
    "{% if d.items %}has{% endif %}{% if d['items'] %}it{% endif %}{% if ed.items is defined %}def{% endif %}{% if ed['items'] is defined %}def2{% endif %}{% if ed.update is defined %}upd{% endif %}",
    "{% for k, v in d.items() if v is number %}{{ k }}{% endfor %}", "{% set d2 = dict(d, **{'q': 1}) %}{{ d2 }}", "{% set x = {'a': 1} %}{% set x = dict(x, b=2) %}{{ x }}",
    "{% set content = messages[1].content if messages|length > 1 else '' %}{{ content }}", "{{ raise_exception('no') }}", "{{ raise_exception('no ' + s) }}", "{% if false %}{{ raise_exception('no') }}{% endif %}ok",
    "{{ '' if true else raise_exception('x') }}", "{{ s.format() }}{{ '{}{}'.format(n, s) }}", "{{ ('a' ~ 'b') * 2 }}", "{{ 'a' 'b' ~ 'c' }}", "{% block x %}B{{ n }}{% endblock %}", "{% do l.append(1) %}",
    "{% set x = l | map('string') %}{{ x | join('') }}", "{% set _ = 1 %}{{ _ }}", "{% set text = 'a' %}{% set text = text + 'b' %}{{ text }}", "{% for i in range(2) %}{% set text = 'x' %}{% endfor %}{{ text is defined }}",
    "{% set ns = namespace() %}{% set ns.x = 1 %}{{ ns.x }}{{ ns.y is defined }}{{ ns.y }}", "{% set ns = namespace(d) %}{{ ns.b }}", "{{ namespace(a=1) is mapping }}", "{% set ns.x = 1 %}", "{% set d.x = 1 %}",
    "{% for x in [1, 2, 2, 3] %}{% if loop.changed(x) %}{{ x }}{% endif %}{% endfor %}", "{{ 'a\nb' }}", "{{ [1, 2, 3,] }}{{ (1, 2,) }}{{ {'a': 1,} }}", "{{ 1 if true }}{{ 1 if false }}x", "{{ (1 if false) is defined }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}", "{% set j = joiner('|') %}{% for x in l %}{{ j() }}{{ x }}{% endfor %}",
    "{{ messages | tojson }}", "{{ messages[0] }}", "{{ messages | map(attribute='content') | list | tojson }}", "{% set x = messages | selectattr('role', 'equalto', 'user') | list %}{{ x[0].content }}",
    "{% for group in rows | groupby('on', default=none) %}{{ group.grouper }}:{{ group.list | length }};{% endfor %}", "{% for key, items in words | groupby(0) %}{{ key }}{{ items }};{% endfor %}", "{{ self }}"[:0] + "{{ l | sort | first }}", "{{ not_defined_fn() }}", "{{ s | nofilter }}", "{{ s is notest }}", "{% if %}", "{{ n", "{% for x in %}{% endfor %}", "{{ 'unclosed }}", "{% endfor %}",
    "{{ 5 // 0 }}", "{{ 5 % 0 }}", "{{ 5 / 0 }}", "{{ 0 ** -1 }}", "{{ n.__class__ }}", "{{ s.__class__.__mro__ }}", "{{ ''.__class__ }}", "{{ d.__class__ is defined }}", "{{ [].__len__() }}", "{{ range(1000000) }}", "{{ (1).real }}",
    "{{ l[1.0] }}", "{{ l['0'] }}", "{{ l[true] }}", "{{ s[true] }}", "{{ d[none] }}", "{{ {none: 1}[none] }}", "{{ {true: 1}[1] }}", "{{ {1: 2}[true] }}", "{{ {1: 2}[1.0] }}", "{{ l[-4] }}", "{{ l['first'] }}", "{{ messages.0.role }}", "{{ l.0 }}", "{{ l.2 + 1 }}",
]


def main():
    cases = []
    seen = set()
    for line in EXPRESSIONS.split("\n"):
        for expression in split(line):
            cases.append("[{{ " + expression + " }}]")
    cases += TEMPLATES
    context = json.dumps(CONTEXT, ensure_ascii=False)
    out = pathlib.Path(__file__).parent.parent / "internal/tokenize/render/testdata/jinja.jsonl"
    errors = 0
    with out.open("w") as f:
        f.write(json.dumps({"context": context}, ensure_ascii=False) + "\n")
        for source in cases:
            if source in seen:
                continue
            seen.add(source)
            record = {"template": source}
            try:
                record["rendered"] = environment().from_string(source).render(**json.loads(context))
                if " at 0x" in record["rendered"]:
                    continue  # an address, another at each run
            except Exception as err:  # whatever a template can cause
                record["error"] = type(err).__name__
                errors += 1
            f.write(json.dumps(record, ensure_ascii=False).replace("\u2028", "\\u2028") + "\n")
    print(f"{len(seen)} cases, {errors} of them errors", file=sys.stderr)


def split(line):
    """Splits a line of expressions at spaces outside of quotes and brackets, joining words that need each other."""
    joiners = {"in", "not", "is", "if", "else", "and", "or", "+", "*", "-", "/", "//", "**", "==", "!=", "<", ">", ">=", "|"}
    words, word, depth, quote, escaped = [], "", 0, None, False
    for c in line:
        if quote:
            word += c
            if escaped:
                escaped = False
            elif c == "\\":
                escaped = True
            elif c == quote:
                quote = None
            continue
        if c in "'\"":
            quote = c
        depth += (c in "([{") - (c in ")]}")
        if c == " " and depth == 0:
            if word:
                words.append(word)
            word = ""
            continue
        word += c
    if word:
        words.append(word)
    tests = {"defined", "none", "number", "string", "odd", "mapping", "sameas", "eq", "divisibleby", "in", "not", "gt", "ne", "le"}
    out = []
    for w in words:
        previous = out[-1].split(" ")[-1] if out else ""
        glue = w in joiners or previous in joiners
        glue = glue or (previous in {"divisibleby", "sameas", "eq", "ne", "le"} and w not in tests)
        if out and glue and not (w == "not" and previous not in joiners and not out[-1].endswith(" is")):
            out[-1] += " " + w
        elif out and glue:
            out[-1] += " " + w if previous else w
        else:
            out.append(w)
    return out


if __name__ == "__main__":
    main()
