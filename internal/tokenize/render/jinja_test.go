package render

import (
	"encoding/json"
	"os"
	"testing"
)

// jinjaCase is a small template and what Jinja itself makes of it (scripts/jinja_cases.py).
type jinjaCase struct {
	Template string  `json:"template"`
	Context  string  `json:"context"`
	Rendered *string `json:"rendered"`
	Error    string  `json:"error"`
}

// TestJinja compares with Jinja on Python what templates can write: operators, methods, filters, tests, loops, macros, white space.
func TestJinja(t *testing.T) {
	if _, err := os.Stat("testdata/jinja.jsonl"); err != nil {
		t.Fatal(err)
	}
	var context []byte
	equal := 0
	for _, line := range lines(t, "testdata/jinja.jsonl") {
		var c jinjaCase
		if err := json.Unmarshal(line, &c); err != nil {
			t.Fatal(err)
		}
		if c.Context != "" {
			context = []byte(c.Context)
			continue
		}
		got, err := renderOnce(t, c.Template, context)
		known := knownJinja[c.Template]
		switch {
		case c.Rendered == nil && err == nil:
			if known == "" {
				t.Errorf("%q renders %q, Jinja fails with %s", c.Template, got, c.Error)
			}
		case c.Rendered == nil:
			equal++
			if known != "" {
				t.Errorf("%q is no difference any more", c.Template)
			}
		case err != nil:
			if known == "" {
				t.Errorf("%q: %v, want %q", c.Template, err, *c.Rendered)
			}
		case got != *c.Rendered:
			if known == "" {
				t.Errorf("%q\nrenders %q\n   want %q", c.Template, got, *c.Rendered)
			}
		default:
			equal++
			if known != "" {
				t.Errorf("%q is no difference any more", c.Template)
			}
		}
	}
	t.Logf("%d as Jinja, %d known differences", equal, len(knownJinja))
}

func renderOnce(tb testing.TB, source string, context []byte) (string, error) {
	tb.Helper()
	tmpl, err := New(Options{Source: Source{Templates: map[string]string{"default": source}}, Now: oracleClock})
	if err != nil {
		return "", err
	}
	defer tmpl.Close()
	got, err := tmpl.RenderContext(context, false)
	return string(got.Text), err
}

// knownJinja lists the differences, each with its reason. docs/decisions/0011-chat-templates.md has them too.
var knownJinja = map[string]string{
	"[{{ +n }}]": "minijinja's parser has no unary plus",
	"{% for x in (1,2) %}{{ x }}{% endfor %}{% for x in 1,2 %}{{ x }}{% endfor %}":                   "minijinja's parser wants brackets around a loop's tuple",
	"{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}":            "minijinja's macros take no more arguments than declared",
	"{% macro m(x=none) %}{{ x is none }}{{ x }}{% endmacro %}{{ m() }}{{ m(missing) }}{{ m(x=0) }}": "minijinja gives an undefined argument its default",
	"{% autoescape true %}{{ html }}{% endautoescape %}":                                             "prompts are never escaped",

	"[{{ d.items() }}]":  "views of dicts are lists here, and print like them",
	"[{{ d.keys() }}]":   "views of dicts are lists here, and print like them",
	"[{{ d.values() }}]": "views of dicts are lists here, and print like them",
	"[{{ ed.items() }}]": "views of dicts are lists here, and print like them",
	"[{{ range(3) }}]":   "ranges are lists here, and print like them",

	"[{{ n.real }}]":                 "numbers have no attributes here",
	"{{ (1).real }}":                 "numbers have no attributes here",
	"[{{ n.bit_length() }}]":         "numbers have no methods here but is_integer",
	"[{{ '{!r}'.format('x') }}]":     "minijinja's formatting has no conversions",
	"[{{ d|pprint }}]":               "pprint sorts keys and breaks lines",
	"[{{ l|random|string|length }}]": "a random prompt has no prefix to share",
	"[{{ lipsum(1)|length>0 }}]":     "a random prompt has no prefix to share",
	"[{{ 'a b'|urlencode }}]":        "a filter for web pages",
	"[{{ {'a':1}|xmlattr }}]":        "a filter for web pages",
	"[{{ 1000000|filesizeformat }}]": "a filter for web pages",

	"[{{ d|dictsort(by='value') }}]": "harmless: Python cannot order values of different types",
	"[{{ \"a,b\"|split(',') }}]":     "harmless: Jinja has no such filter",
	"{% for group in rows | groupby('on', default=none) %}{{ group.grouper }}:{{ group.list | length }};{% endfor %}": "harmless: Python cannot order None and booleans",
}
