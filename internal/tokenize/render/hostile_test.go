package render

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
)

// hostile templates try to take the process down, or its time or memory. kinds are the outcomes that are right.
var hostile = []struct {
	name, source string
	kinds        string
}{
	{"recursion", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "failed limit"},
	{"mutual recursion", "{% macro a(x) %}{{ b(x) }}{% endmacro %}{% macro b(x) %}{{ a(x) }}{% endmacro %}{{ a(1) }}", "failed limit"},
	{"recursion that doubles", "{% macro f(x) %}{{ f(x ~ x) }}{{ f(x) }}{% endmacro %}{{ f('aaaaaaaa') }}", "failed limit"},
	{"recursion by caller", "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}", "failed limit"},
	{"recursion over nesting", "{% macro f(x) %}[{% for y in x %}{{ f(y) }}{% endfor %}]{% endmacro %}{{ f(deep) }}", "failed limit"},
	{"recursive loop", "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}", "failed limit"},
	{"empty loops", "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}{% endfor %}{% endfor %}", "limit"},
	{"printing loops", "{% for a in range(100000) %}{% for b in range(100000) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}", "limit"},
	{"doubling text", "{% set ns = namespace(s='x') %}{% for a in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}", "limit"},
	{"doubling text by join", "{% set ns = namespace(s='x') %}{% for a in range(100) %}{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}", "limit"},
	{"doubling text by blocks", "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(100) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}", "limit"},
	{"doubling text by concatenation", "{% set ns = namespace(s='x') %}{% for a in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "limit"},
	{"doubling text by replacing", "{% set ns = namespace(s='x') %}{% for a in range(100) %}{% set ns.s = ns.s|replace('x','xx') %}{% endfor %}", "limit"},
	{"doubling lists", "{% set ns = namespace(l=[1]) %}{% for a in range(100) %}{% set ns.l = ns.l + ns.l %}{% endfor %}", "limit"},
	{"multiplied text", "{{ 'x' * 10000000000 }}", "limit failed"},
	{"multiplied list", "{{ [1] * 10000000000 }}", "limit failed"},
	{"multiplied tuple", "{{ (1,) * 10000000000 }}", "limit failed"},
	{"large range", "{{ range(1000000000)|list }}", "failed"},
	{"wide format", "{{ '%9999999999d'|format(1) }}", "limit"},
	{"exact format", "{{ '%.9999999999f'|format(1) }}", "limit"},
	{"wide str.format", "{{ '{:>9999999999}'.format(1) }}", "limit failed"},
	{"nested str.format", "{{ '{:{}}'.format(1, 9999999999) }}", "limit failed"},
	{"many str.formats", "{{ ('{0:>99999}' * 100000).format(1) }}", "limit"},
	{"center", "{{ 'x'.center(10000000000) }}", "limit"},
	{"center filter", "{{ 'x'|center(10000000000) }}", "limit"},
	{"zfill", "{{ 'x'.zfill(10000000000) }}", "limit"},
	{"ljust", "{{ 'x'.ljust(10000000000) }}", "limit"},
	{"expandtabs", "{{ ('\\t' * 1000000).expandtabs(1000000) }}", "limit"},
	{"batch", "{{ [1]|batch(10000000000, 0) }}", "limit"},
	{"slices", "{{ [1]|slice(10000000000, 0)|list }}", "limit failed"},
	{"indent", "{{ ('\\n' * 1000000)|indent(1000000, true, true) }}", "limit"},
	{"tojson indent", "{{ deep|tojson(indent=1000000) }}", "limit ok"},
	{"power", "{{ 10 ** 10 ** 10 }}", "failed"},
	{"many powers", "{{ 2 ** 100000000 }}", "failed"},
	{"deep value", deepValue + "done", "limit"},
	{"deep value printed", deepLoop + "{{ ns.x }}", "failed limit"},
	{"deep value as JSON", deepLoop + "{{ ns.x|tojson }}", "failed limit"},
	{"deep values compared", deepLoop + "{% set a = [ns.x] %}{% set b = [ns.x] %}{{ a == b }}", "failed limit"},
	{"deep values ordered", deepLoop + "{{ [[ns.x], [ns.x]]|sort }}", "failed limit"},
	{"deep values made unique", deepLoop + "{{ [[ns.x], [ns.x]]|unique|list }}", "failed limit"},
	{"deep value as key", deepLoop + "{{ {ns.x: 1} }}", "failed limit"},
	{"deep value looked up", deepLoop + "{{ {1: 2}[ns.x] }}", "ok failed limit"},
	{"deep value searched", deepLoop + "{{ [ns.x] in [[ns.x]] }}", "failed limit"},
	{"deep value tested", deepLoop + "{{ [ns.x] is eq([ns.x]) }}", "failed limit"},
	{"deep value formatted", deepLoop + "{{ '{}'.format(ns.x) }}", "failed limit"},
	{"deep value concatenated", deepLoop + "{{ ns.x ~ '' }}", "failed limit"},
	{"deep value changed", deepLoop + "{% for i in range(2) %}{{ loop.changed([ns.x]) }}{% endfor %}", "failed limit"},
	{"deep value dropped", deepLoop + "x", "ok limit"},
	{"slow replace", "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% set t = s|replace('b', 'c') %}{% endfor %}", "limit"},
	{"slow search", "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% if 'b' in s %}{% endif %}{% endfor %}", "limit"},
	{"slow slices", "{% set s = 'é' * 1000000 %}{% for i in range(100000) %}{% set t = s[500000:] %}{% endfor %}", "limit"},
	{"slow lists", "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set t = l[1:] %}{% endfor %}", "limit"},
	{"slow sorts", "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set t = l|sort(reverse=true) %}{% endfor %}", "limit"},
	{"slow split", "{% set s = 'a ' * 100000 %}{% for i in range(100000) %}{% set t = s.split() %}{% endfor %}", "limit"},
	{"slow JSON", "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set t = l|tojson %}{% endfor %}", "limit"},
	{"slow groups", "{% set l = range(100000)|list %}{% for i in range(100000) %}{% set t = l|map('string')|join|length %}{% endfor %}", "limit"},
	{"other files", "{% include '/etc/passwd' %}", "failed"},
	{"imports", "{% import '/etc/passwd' as x %}", "failed"},
	{"extends", "{% extends 'default' %}", "failed limit"},
	{"includes itself", "{% include 'chat_template' %}", "failed limit"},
	{"debug", "{{ debug() }}", "failed"},
}

// deepLoop nests a list some 400,000 levels deep, with as little fuel for each level as it takes.
const deepLoop = "{% set ns = namespace(x=[]) %}{% for a in range(12500) %}{% set ns.x = [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[ns.x]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]] %}{% endfor %}"

// deepValue nests a value as deeply as fuel lasts.
const deepValue = "{% set ns = namespace(x=[]) %}{% for a in range(100000) %}{% for b in range(100000) %}{% set ns.x = [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[ns.x]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]] %}{% endfor %}{% endfor %}"

func TestHostileTemplates(t *testing.T) {
	context := `{"messages": [], "deep": ` + strings.Repeat("[", 400) + strings.Repeat("]", 400) + `}`
	for _, h := range hostile {
		t.Run(h.name, func(t *testing.T) {
			tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": h.source}}, MaxOutputBytes: 1 << 20, Timeout: 500 * time.Millisecond})
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := tmpl.RenderContext([]byte(context), false)
			runtime.ReadMemStats(&after)
			got := "ok"
			if failure, ok := errors.AsType[*Error](err); ok {
				got = failure.Kind.String()
			}
			if !strings.Contains(" "+h.kinds+" ", " "+got+" ") {
				t.Errorf("outcome %s (%v), want one of %q", got, err, h.kinds)
			}
			if grown := after.TotalAlloc - before.TotalAlloc; grown > 64<<20 {
				t.Errorf("%d bytes of Go memory", grown)
			}
		})
	}
}

// TestDeepValueWithMuchFuel gives a template that nests values the most fuel a request can bring it.
func TestDeepValueWithMuchFuel(t *testing.T) {
	tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": deepValue}}, Timeout: 20 * time.Second})
	padding := strings.Repeat("x", 8<<20)
	_, err := tmpl.RenderContext([]byte(`{"messages": [], "padding": "`+padding+`"}`), false)
	var failure *Error
	if !errors.As(err, &failure) || failure.Kind != Limit {
		t.Errorf("RenderContext() error %v, want one of kind limit", err)
	}
}

// TestHostileSources compiles what should not compile, and what nests without end.
func TestHostileSources(t *testing.T) {
	many := 100_000
	for name, source := range map[string]string{
		"brackets":      "{{ " + strings.Repeat("(", many) + "1" + strings.Repeat(")", many) + " }}",
		"lists":         "{{ " + strings.Repeat("[", many) + strings.Repeat("]", many) + " }}",
		"attributes":    "{{ a" + strings.Repeat(".b", many) + " }}",
		"items":         "{{ a" + strings.Repeat("[0]", many) + " }}",
		"calls":         "{{ a" + strings.Repeat("()", many) + " }}",
		"filters":       "{{ a" + strings.Repeat("|e", many) + " }}",
		"additions":     "{{ a" + strings.Repeat("+a", many) + " }}",
		"concatenation": "{{ a" + strings.Repeat("~a", many) + " }}",
		"conjunctions":  "{{ a" + strings.Repeat(" and a", many) + " }}",
		"negations":     "{{ " + strings.Repeat("not ", many) + "a }}",
		"signs":         "{{ " + strings.Repeat("-", many) + "1 }}",
		"powers":        "{{ 1" + strings.Repeat("**1", many) + " }}",
		"conditions":    "{{ a" + strings.Repeat(" if a else a", many) + " }}",
		"branches":      strings.Repeat("{% if a %}", 50_000) + strings.Repeat("{% endif %}", 50_000),
		"elif":          "{% if a %}" + strings.Repeat("{% elif a %}", 50_000) + "{% endif %}",
		"loops":         strings.Repeat("{% for a in b %}", 30_000) + strings.Repeat("{% endfor %}", 30_000),
		"macros":        strings.Repeat("{% macro a() %}", 30_000) + strings.Repeat("{% endmacro %}", 30_000),
		"unclosed":      strings.Repeat("{% if a %}", many),
		"large":         strings.Repeat("x", 2<<20),
		"open tag":      strings.Repeat("{{", many),
		"open string":   "{{ '" + strings.Repeat("\\", many),
		"open comment":  strings.Repeat("{#", many),
		"raw":           strings.Repeat("{% raw %}", many),
		"null bytes":    "\x00{{ '\x00' }}{% \x00 %}",
		"not UTF-8":     "\xff{{ '\xff' }}",
	} {
		t.Run(name, func(t *testing.T) {
			tmpl, err := New(Options{Source: Source{Templates: map[string]string{"default": source}}})
			if err != nil {
				if len(err.Error()) > 500 {
					t.Errorf("an error of %d bytes", len(err.Error()))
				}
				return
			}
			defer tmpl.Close()
			// Whether it renders does not matter: that it comes back does.
			_, _ = tmpl.RenderContext([]byte(`{"messages": [], "a": 1, "b": [1]}`), false)
		})
	}
}

func TestHostileRequests(t *testing.T) {
	tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": "{{ messages|tojson }}{{ tools|tojson }}"}}})
	deep := strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000)
	objects := strings.Repeat(`{"a":`, 20_000) + "1" + strings.Repeat("}", 20_000)
	user := `[{"role":"user","content":"x"}]`
	for name, c := range map[string]struct {
		in   Input
		want Kind
	}{
		"deep messages":    {Input{Messages: []byte(deep)}, Unsupported},
		"deep content":     {Input{Messages: []byte(`[{"role":"user","content":` + deep + `}]`)}, Unsupported},
		"deep tools":       {Input{Messages: []byte(user), Tools: []byte(`[{"type":"function","function":{"name":"f","parameters":` + objects + `}}]`)}, Unsupported},
		"deep kwargs":      {Input{Messages: []byte(user), ChatTemplateKwargs: []byte(objects)}, Unsupported},
		"deep arguments":   {Input{Messages: []byte(fmt.Sprintf(`[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":%q}}]}]`, objects))}, Unsupported},
		"half a surrogate": {Input{Messages: []byte(`[{"role":"user","content":"\ud83d"}]`)}, Unsupported},
		"not UTF-8":        {Input{Messages: []byte("[{\"role\":\"user\",\"content\":\"\xff\"}]")}, Unsupported},
		"no JSON":          {Input{Messages: []byte(`[{"role":"user"`)}, Invalid},
		"nothing":          {Input{}, Invalid},
		"null":             {Input{Messages: []byte(`null`)}, Invalid},
		"no list":          {Input{Messages: []byte(`{}`)}, Invalid},
		"no object":        {Input{Messages: []byte(`[1]`)}, Invalid},
		"no role":          {Input{Messages: []byte(`[{"content":"x"}]`)}, Invalid},
		"number":           {Input{Messages: []byte(`[{"role":"user","content":5}]`)}, Invalid},
		"tools no list":    {Input{Messages: []byte(user), Tools: []byte(`{}`)}, Invalid},
		"tool no function": {Input{Messages: []byte(user), Tools: []byte(`[{}]`)}, Invalid},
		"template sent":    {Input{Messages: []byte(user), ChatTemplate: true}, Unsupported},
		"template as kwarg": {
			Input{Messages: []byte(user), ChatTemplateKwargs: []byte(`{"chat_template":"{{ 1 }}"}`)}, Invalid,
		},
		"both ends":   {Input{Messages: []byte(user), AddGenerationPrompt: new(true), ContinueFinalMessage: new(true)}, Invalid},
		"end implied": {Input{Messages: []byte(user), ContinueFinalMessage: new(true)}, Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := tmpl.Render(&c.in)
			var failure *Error
			if !errors.As(err, &failure) || failure.Kind != c.want {
				t.Errorf("Render() error %v, want one of kind %v", err, c.want)
			}
		})
	}
}

// The time of a render includes reading the request: a body of a million tiny parts used to take seconds before the template began.
func TestReadingTakesItsTimeFromTheBudget(t *testing.T) {
	tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": "x"}}, Timeout: 5 * time.Millisecond})
	many := func(s string) string { return "[" + strings.Repeat(s+",", 500_000) + s + "]" }
	for name, in := range map[string]*Input{
		"messages": {Messages: []byte(many(`{"role":"user","content":""}`))},
		"parts":    {Messages: []byte(`[{"role":"user","content":` + many(`{"type":"text","text":"a"}`) + `}]`)},
		"tools":    {Messages: []byte(`[]`), Tools: []byte(many(`{"type":"function","function":{"name":"f"}}`))},
		"kwargs":   {Messages: []byte(`[]`), ChatTemplateKwargs: []byte(`{"a":` + many(`0`) + `}`)},
	} {
		_, err := tmpl.Render(in)
		if failure, ok := errors.AsType[*Error](err); !ok || failure.Kind != Limit {
			t.Errorf("Render() of many %s: error %v, want one of kind %v", name, err, Limit)
		}
	}
	if _, err := tmpl.Render(&Input{Messages: []byte(`[{"role":"user","content":"a"}]`)}); err != nil {
		t.Errorf("Render() after those: %v", err)
	}
}

// TestErrorsQuoteNothing renders conversations whose words must not appear in an error.
func TestErrorsQuoteNothing(t *testing.T) {
	for _, source := range []string{
		"{{ raise_exception(messages[0].content) }}",
		"{{ raise_exception('Own words: ' + messages[0].content) }}",
		"{{ raise_exception('Own words: ' ~ messages[0].content ~ '.') }}",
		"{{ raise_exception('Own words: %s' % messages[0].content) }}",
		"{{ raise_exception('Own words: %s'|format(messages[0].content)) }}",
		"{{ raise_exception(messages[0].content + 'x') }}",
		"{{ messages[0].content + 1 }}", "{{ messages[0].content.x.y }}", "{{ messages[0].content() }}",
		"{{ messages[0].content|nofilter }}", "{{ messages[0].content - 1 }}", "{{ messages[0].content ** 2 }}",
		"{{ -messages[0].content }}", "{{ messages[0].content|int // 0 }}", "{{ messages[0][messages[0].content].x }}",
		"{{ messages[0].content.split('') }}", "{{ strftime_now(messages[0].content) }}", "{{ messages[0].content|items }}",
		"{{ messages[0].content|map(messages[0].content)|list }}", "{{ messages|selectattr('content', messages[0].content)|list }}",
		"{{ '{:secret}'.format(messages[0].content) }}", "{{ messages[0].content.format() }}", "{{ messages[0].content % 1 }}",
		"{{ dict(messages[0].content) }}", "{{ namespace(messages[0].content) }}", "{% include messages[0].content %}",
		"{{ range(messages[0].content) }}", "{{ messages[0].content|round }}", "{{ messages[0].content|tojson(indent=messages[0].content, x=1) }}",
	} {
		tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": source}}})
		_, err := tmpl.Render(&Input{Messages: []byte(`[{"role":"user","content":"se{}cret %q secret"}]`)})
		if err == nil {
			t.Errorf("%s: no error", source)
			continue
		}
		if strings.Contains(err.Error(), "cret") {
			t.Errorf("%s: the error quotes the conversation: %v", source, err)
		}
		if strings.Contains(source, "'Own words: ") && !strings.Contains(err.Error(), "Own words: …") {
			t.Errorf("%s: the error lacks the template's own words: %v", source, err)
		}
	}
}
