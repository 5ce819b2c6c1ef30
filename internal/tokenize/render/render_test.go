package render

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"prefixgate/internal/testenv"
)

// chatml prints what it is handed as JSON, and is one that wants texts.
const dumps = "{{ messages|tojson }}\n{{ tools|tojson }}"

// parts is the same for a template that goes through content.
const parts = "{% if false %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}{% endif %}" + dumps

func TestPreparation(t *testing.T) {
	for _, c := range []struct {
		name, source, messages, tools, want string
	}{
		{"text", dumps, `[{"role":"user","content":"hi","extra":1}]`, "", `[{"role": "user", "content": "hi"}]` + "\nnull"},
		{"text to parts", parts, `[{"role":"user","content":"hi"}]`, "", `[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]` + "\nnull"},
		{"parts to text", dumps, `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":""},{"type":"text","text":"b","cache_control":{}}]}]`, "", `[{"role": "user", "content": "a\nb"}]` + "\nnull"},
		{"parts", parts, `[{"role":"user","content":[{"type":"text","text":"a","cache_control":{}},{"type":"refusal","refusal":"no"}]}]`, "", `[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "no"}]}]` + "\nnull"},
		{"null", dumps, `[{"role":"assistant","content":null}]`, "", `[{"role": "assistant", "content": ""}]` + "\nnull"},
		{"null to parts", parts, `[{"role":"assistant"}]`, "", `[{"role": "assistant", "content": []}]` + "\nnull"},
		{"tool calls", dumps, `[{"role":"assistant","tool_calls":[{"index":0,"type":"function","id":"1","function":{"name":"f","arguments":"{\"b\": 1, \"a\": [1.0, 1e16, 12345678901234567890123456789012345678901234567890]}"}}]}]`, "", `[{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"arguments": {"b": 1, "a": [1.0, 1e+16, 12345678901234567890123456789012345678901234567890]}, "name": "f"}, "type": "function"}]}]` + "\nnull"},
		{"bad arguments", dumps, `[{"role":"assistant","tool_calls":[{"type":"function","id":"1","function":{"name":"f","arguments":"[1]"}},{"type":"function","id":"2","function":{"name":"f","arguments":""}},{"type":"function","id":"3","function":{"name":"f"}}]}]`, "", `[{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"arguments": {}, "name": "f"}, "type": "function"}, {"id": "2", "function": {"arguments": {}, "name": "f"}, "type": "function"}, {"id": "3", "function": {"arguments": {}, "name": "f"}, "type": "function"}]}]` + "\nnull"},
		{"no tool calls", dumps, `[{"role":"assistant","content":"x","tool_calls":[]}]`, "", `[{"role": "assistant", "content": "x"}]` + "\nnull"},
		{"tool calls of a user", dumps, `[{"role":"user","content":"x","tool_calls":[{"id":"1"}]}]`, "", `[{"role": "user", "content": "x"}]` + "\nnull"},
		{"reasoning", dumps, `[{"role":"assistant","content":"x","reasoning":"r"},{"role":"assistant","content":"y","reasoning_content":"s"},{"role":"user","content":"z","reasoning":"t"}]`, "", `[{"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"}, {"role": "assistant", "content": "y", "reasoning": "s", "reasoning_content": "s"}, {"role": "user", "content": "z"}]` + "\nnull"},
		{"tool result", parts, `[{"role":"tool","tool_call_id":"1","name":"f","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]`, "", `[{"role": "tool", "content": "a\nb", "tool_call_id": "1", "name": "f"}]` + "\nnull"},
		{"developer", dumps, `[{"role":"system","content":"a"},{"role":"user","content":"u"},{"role":"developer","content":"b","tools":[]},{"role":"system","content":""}]`, "", `[{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "u"}]` + "\nnull"},
		{"developer first", dumps, `[{"role":"developer","content":"b","name":"n"},{"role":"user","content":"u"}]`, "", `[{"role": "system", "content": "b", "name": "n"}, {"role": "user", "content": "u"}]` + "\nnull"},
		{"developer as parts", parts, `[{"role":"user","content":"u"},{"role":"developer","content":"b"}]`, "", `[{"role": "system", "content": "b"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]` + "\nnull"},
		{"developer known", dumps + "{% if messages[0].role == 'developer' %}{% endif %}", `[{"role":"developer","content":"b"}]`, "", `[{"role": "developer", "content": "b", "tools": null}]` + "\nnull"},
		{"systems stay", dumps, `[{"role":"user","content":"u"},{"role":"system","content":"b"}]`, "", `[{"role": "user", "content": "u"}, {"role": "system", "content": "b"}]` + "\nnull"},
		{"billing header", dumps, `[{"role":"system","content":"x-anthropic-billing-header: cch=1\nbe"},{"role":"user","content":"x-anthropic-billing-header: y\nz"}]`, "", `[{"role": "system", "content": "be"}, {"role": "user", "content": "x-anthropic-billing-header: y\nz"}]` + "\nnull"},
		{"billing header part", parts, `[{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: cch=1"},{"type":"text","text":"be"}]}]`, "", `[{"role": "system", "content": [{"type": "text", "text": "be"}]}]` + "\nnull"},
		{"tools", dumps, `[]`, `[{"function":{"parameters":{"z":1.50,"a":-0,"n":1e2,"u":"é\u2028\/"},"name":"f","strict":true,"other":1},"type":"function","cache":1},{"function":{"name":"g","strict":null}}]`, "[]\n" + `[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"z": 1.5, "a": 0, "n": 100.0, "u": "é` + "\u2028" + `/"}, "strict": true}}, {"type": "function", "function": {"name": "g", "description": null, "parameters": null}}]`},
		{"repeated keys", dumps, `[{"content":"1","role":"user","content":"2"}]`, "", `[{"role": "user", "content": "2"}]` + "\nnull"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": c.source}}})
			got, err := tmpl.Render(&Input{Messages: []byte(c.messages), Tools: []byte(c.tools)})
			if err != nil {
				t.Fatal(err)
			}
			if string(got.Text) != c.want {
				t.Errorf("Render() = %s\n want %s", got.Text, c.want)
			}
		})
	}
}

func TestArguments(t *testing.T) {
	const source = "{{ enable_thinking }}|{{ reasoning_effort }}|{{ custom }}|{{ documents|tojson }}|{{ add_generation_prompt }}|{{ bos_token }}"
	src := Source{Templates: map[string]string{"default": source}, SpecialTokens: map[string]any{"bos_token": "<s>"}}
	for _, c := range []struct {
		name                 string
		kwargs, effort, docs string
		add                  *bool
		defaults             string
		want                 string
	}{
		{name: "none", want: "||" + "|null|True|<s>"},
		{name: "kwargs", kwargs: `{"enable_thinking":false,"custom":[1],"unknown":1}`, want: "False||[1]|null|True|<s>"},
		{name: "effort", effort: `"low"`, want: "True|low||null|True|<s>"},
		{name: "no effort", effort: `"none"`, want: "False|none||null|True|<s>"},
		{name: "effort and kwarg", effort: `"high"`, kwargs: `{"enable_thinking":false,"reasoning_effort":"x"}`, want: "False|high||null|True|<s>"},
		{name: "null effort", effort: `null`, kwargs: `{"reasoning_effort":"x"}`, want: "|x||null|True|<s>"},
		{name: "documents", docs: `[{"title":"t"}]`, kwargs: `{"documents":[]}`, want: `||` + `|[{"title": "t"}]|True|<s>`},
		{name: "documents by kwarg", kwargs: `{"documents":[{"title":"k"}]}`, want: `||` + `|[{"title": "k"}]|True|<s>`},
		{name: "no generation prompt", add: new(false), kwargs: `{"add_generation_prompt":true}`, want: "||" + "|null|False|<s>"},
		{name: "special token", kwargs: `{"bos_token":"<b>"}`, want: "||" + "|null|True|<b>"},
		{name: "defaults", defaults: `{"custom":"d","enable_thinking":true}`, kwargs: `{"enable_thinking":false}`, want: "False||d|null|True|<s>"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tmpl := open(t, Options{Source: src, DefaultKwargs: []byte(c.defaults)})
			got, err := tmpl.Render(&Input{
				Messages: []byte(`[]`), ChatTemplateKwargs: []byte(c.kwargs), ReasoningEffort: []byte(c.effort),
				Documents: []byte(c.docs), AddGenerationPrompt: c.add,
			})
			if err != nil {
				t.Fatal(err)
			}
			if string(got.Text) != c.want {
				t.Errorf("Render() = %q, want %q", got.Text, c.want)
			}
		})
	}
}

func TestNamedTemplates(t *testing.T) {
	tmpl := open(t, Options{Source: Source{Templates: map[string]string{
		"default": "plain", "tool_use": "tools {% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
	}}, ExcludeToolsWhenChoiceNone: true})
	tools := []byte(`[{"type":"function","function":{"name":"f"}}]`)
	for _, c := range []struct {
		in     Input
		text   string
		format Format
	}{
		{Input{}, "plain", FormatText},
		{Input{Tools: tools}, "tools ", FormatParts},
		{Input{Tools: []byte("[]")}, "tools ", FormatParts},
		{Input{Tools: []byte("null")}, "plain", FormatText},
		{Input{Tools: tools, ToolChoice: []byte(`"none"`)}, "plain", FormatText},
		{Input{Tools: tools, ToolChoice: []byte(`"auto"`)}, "tools ", FormatParts},
	} {
		c.in.Messages = []byte("[]")
		got, err := tmpl.Render(&c.in)
		if err != nil {
			t.Fatal(err)
		}
		if string(got.Text) != c.text || got.Format != c.format {
			t.Errorf("Render(%s) = %q, %v, want %q, %v", c.in.Tools, got.Text, got.Format, c.text, c.format)
		}
	}
}

func TestContentFormat(t *testing.T) {
	for source, want := range map[string]Format{
		"{% for m in messages %}{{ m.content }}{% endfor %}":                                                              FormatText,
		"{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}":                                      FormatParts,
		"{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}":                                         FormatParts,
		"{% for m in messages[1:] %}{% for c in m.content|list %}{% endfor %}{% endfor %}":                                FormatParts,
		"{% set l = messages %}{% for m in l %}{% for c in m.content %}{% endfor %}{% endfor %}":                          FormatParts,
		"{% if x %}{% set l = messages[1:] %}{% endif %}{% for m in l %}{% for c in m.content %}{% endfor %}{% endfor %}": FormatParts,
		"{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}":                          FormatText,
		"{% for a, m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}":                                      FormatText,
		"{% for m in others %}{% for c in m.content %}{% endfor %}{% endfor %}":                                           FormatText,
		"{% macro p(m) %}{% for c in m.content %}{% endfor %}{% endmacro %}{% for m in messages %}{{ p(m) }}{% endfor %}": FormatParts,
		"{% set messages = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}":            FormatParts,
	} {
		tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": source}}})
		if got := tmpl.ContentFormat(); got != want {
			t.Errorf("%s: %v, want %v", source, got, want)
		}
	}
}

func TestMedia(t *testing.T) {
	const vision = "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{% if c.type == 'text' %}{{ c.text|trim }}{% elif c.type == 'image' %}<img{{ loop.index }}>{% else %}<other>{% endif %}{% endfor %}</>{% endfor %}"
	const image = `{"type":"image_url","image_url":{"url":"data:,x"}}`
	for _, c := range []struct {
		name, source, messages, placeholder, text string
		placed                                    []string
	}{
		{"one", vision, `[{"role":"user","content":[{"type":"text","text":"a"},` + image + `,{"type":"text","text":"b"}]}]`, "", "<user>a<img2>b</>", []string{"<img2>"}},
		{"two", vision, `[{"role":"user","content":[` + image + `,{"type":"text","text":"b"},{"type":"input_audio","input_audio":{}}]},{"role":"user","content":"x"}]`, "", "<user><img1>b<other></><user>x</>", []string{"<img1>", "<other>"}},
		{"side by side", vision, `[{"role":"user","content":[` + image + `,` + image + `]}]`, "", "<user><img1><img2></>", []string{"", ""}},
		{"not printed", "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", `[{"role":"user","content":[{"type":"text","text":"a"},` + image + `,{"type":"text","text":"b"}]}]`, "", "ab", []string{""}},
		{"placeholder", "{% for m in messages %}{{ m.content }};{% endfor %}", `[{"role":"user","content":[{"type":"text","text":"a"},` + image + `,{"type":"text","text":"b"}]}]`, "<image>", "<image>\na\nb;", []string{"<image>"}},
		{"placeholder in text", "{% for m in messages %}{{ m.content }};{% endfor %}", `[{"role":"user","content":[{"type":"text","text":"a <image> c"},` + image + `]}]`, "<image>", "a <image> c;", []string{""}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": c.source}}, ImagePlaceholder: c.placeholder})
			got, err := tmpl.Render(&Input{Messages: []byte(c.messages)})
			if err != nil {
				t.Fatal(err)
			}
			if string(got.Text) != c.text {
				t.Errorf("Render() = %q, want %q", got.Text, c.text)
			}
			placed := []string{}
			for _, m := range got.Media {
				text := string(got.Text[m.Start:m.End])
				if !m.Placed {
					text = ""
				}
				placed = append(placed, text)
			}
			if fmt.Sprint(placed) != fmt.Sprint(c.placed) || len(placed) != len(c.placed) {
				t.Errorf("placed %q, want %q", placed, c.placed)
			}
		})
	}
	tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": "{{ messages[0].content }}"}}})
	_, err := tmpl.Render(&Input{Messages: []byte(`[{"role":"user","content":[` + image + `]}]`)})
	var failure *Error
	if !errors.As(err, &failure) || failure.Kind != Unsupported {
		t.Errorf("Render() error %v, want one of kind unsupported", err)
	}
}

func TestLoadSource(t *testing.T) {
	write := func(files map[string]string) string {
		dir := t.TempDir()
		for name, text := range files {
			path := filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	const tokens = `"bos_token":{"content":"<s>","lstrip":false},"eos_token":"</s>","pad_token":null,"additional_special_tokens":["<a>",{"content":"<b>"}]`
	for _, c := range []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"text", map[string]string{"tokenizer_config.json": `{"chat_template":"t",` + tokens + `}`}, "map[default:t] map[additional_special_tokens:[<a> <b>] bos_token:<s> eos_token:</s>]"},
		{"list", map[string]string{"tokenizer_config.json": `{"chat_template":[{"name":"default","template":"a"},{"name":"tool_use","template":"b"}]}`}, "map[default:a tool_use:b] map[]"},
		{"object", map[string]string{"tokenizer_config.json": `{"chat_template":{"default":"a","rag":"c"}}`}, "map[default:a rag:c] map[]"},
		{"jinja file wins", map[string]string{"tokenizer_config.json": `{"chat_template":"t"}`, "chat_template.jinja": "j", "chat_template.json": `{"chat_template":"n"}`, "additional_chat_templates/tool_use.jinja": "u"}, "map[default:j tool_use:u] map[]"},
		{"json file", map[string]string{"tokenizer_config.json": `{"chat_template":"t"}`, "chat_template.json": `{"chat_template":"n"}`}, "map[default:n] map[]"},
		{"special tokens map", map[string]string{"tokenizer_config.json": `{"chat_template":"t","bos_token":"<c>"}`, "special_tokens_map.json": `{"bos_token":"<m>","unk_token":{"content":"<u>"}}`}, "map[default:t] map[bos_token:<c> unk_token:<u>]"},
	} {
		src, err := LoadSource(write(c.files))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := fmt.Sprint(src.Templates, src.SpecialTokens); got != c.want {
			t.Errorf("%s: LoadSource() = %s, want %s", c.name, got, c.want)
		}
	}
	src, err := LoadSource(write(map[string]string{"tokenizer_config.json": `{"bos_token":"<s>"}`}))
	if !errors.Is(err, ErrNoTemplate) || src.SpecialTokens["bos_token"] != "<s>" {
		t.Errorf("LoadSource() without a template = %v, %v", src, err)
	}
	for name, files := range map[string]map[string]string{
		"broken config":   {"tokenizer_config.json": `{"chat_template":`},
		"template number": {"tokenizer_config.json": `{"chat_template":5}`},
		"broken tokens":   {"tokenizer_config.json": `{}`, "special_tokens_map.json": `[]`},
	} {
		if _, err := LoadSource(write(files)); err == nil || errors.Is(err, ErrNoTemplate) || !strings.Contains(err.Error(), ".json") {
			t.Errorf("%s: LoadSource() error %v, want one that names the file", name, err)
		}
	}
}

func TestNewErrors(t *testing.T) {
	for source, want := range map[string]string{
		"{% if %}":            "line 1",
		"a\n{% for x in y %}": "chat template \"default\"",
		"a\nb\n{{ x | }}":     "line 3",
		"{% endfor %}":        "line 1",
		"{{ 'unclosed }}":     "chat template",
	} {
		_, err := New(Options{Source: Source{Templates: map[string]string{"default": source}}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New(%q) error %v, want one with %q", source, err, want)
		}
	}
	if _, err := New(Options{}); err == nil {
		t.Error("New without a template succeeds")
	}
	if _, err := New(Options{Source: Source{Templates: map[string]string{"default": ""}}, DefaultKwargs: []byte("[")}); err == nil {
		t.Error("New with broken default arguments succeeds")
	}
}

func TestClock(t *testing.T) {
	zone := time.FixedZone("X", -5*3600)
	now := time.Date(2024, 2, 29, 23, 59, 1, 250_000_000, zone)
	tmpl := open(t, Options{
		Source: Source{Templates: map[string]string{"default": "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f %a %j %s') }}"}},
		Now:    func() time.Time { return now },
	})
	got, err := tmpl.Render(&Input{Messages: []byte("[]")})
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("2024-02-29 23:59:01.250000 Thu 060 %d", now.Unix()); string(got.Text) != want || !got.UsesClock {
		t.Errorf("Render() = %q, %v, want %q, true", got.Text, got.UsesClock, want)
	}
}

// TestLargeOutput takes the way through a second call, for a text that does not fit the first guess.
func TestLargeOutput(t *testing.T) {
	tmpl := open(t, Options{Source: Source{Templates: map[string]string{"default": "{{ 'é' * 100000 }}"}}})
	got, err := tmpl.Render(&Input{Messages: []byte("[]")})
	if err != nil || string(got.Text) != strings.Repeat("é", 100000) {
		t.Errorf("Render() = %d bytes, %v", len(got.Text), err)
	}
	small := open(t, Options{Source: Source{Templates: map[string]string{"default": "{{ 'é' * 100 }}"}}, MaxOutputBytes: 199})
	var failure *Error
	if _, err := small.Render(&Input{Messages: []byte("[]")}); !errors.As(err, &failure) || failure.Kind != Limit {
		t.Errorf("Render() error %v, want one of kind limit", err)
	}
}

func TestConcurrentUse(t *testing.T) {
	tmpl := openModel(t, "qwen3")
	in := conversation(50, 200)
	want, err := tmpl.Render(in)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for range 20 {
				got, err := tmpl.Render(in)
				if errors.Is(err, ErrClosed) {
					return
				}
				if err != nil || string(got.Text) != string(want.Text) {
					t.Errorf("Render() = %d bytes, %v", len(got.Text), err)
					return
				}
			}
		})
	}
	wg.Go(func() {
		// Somewhere in the middle of it.
		for range 3 {
			if _, err := tmpl.Render(in); err != nil {
				t.Error(err)
			}
		}
		if err := tmpl.Close(); err != nil {
			t.Error(err)
		}
	})
	wg.Wait()
	if _, err := tmpl.Render(in); !errors.Is(err, ErrClosed) {
		t.Errorf("Render() after Close() error %v, want ErrClosed", err)
	}
	if err := tmpl.Close(); err != nil {
		t.Errorf("a second Close(): %v", err)
	}
}

// conversation makes a request of turns messages, each of about size bytes.
func conversation(turns, size int) *Input {
	var b strings.Builder
	b.WriteString(`[{"role":"system","content":"You are a helpful assistant."}`)
	text := strings.Repeat(`The quick brown fox said \"hi\" to the lazy dog.\n`, size/48+1)
	for i := range turns {
		role := "user"
		if i%2 == 1 {
			role = "assistant"
		}
		fmt.Fprintf(&b, `,{"role":%q,"content":"%d %s"}`, role, i, text)
	}
	b.WriteString("]")
	return &Input{Messages: []byte(b.String())}
}

func FuzzRender(f *testing.F) {
	src, err := LoadSource(testenv.Tokenizer(f, "qwen3"))
	if err != nil {
		f.Fatal(err)
	}
	tmpl := open(f, Options{Source: src})
	vision := open(f, Options{Source: Source{Templates: map[string]string{"default": parts}}})
	f.Add([]byte(`[{"role":"user","content":"hi"}]`), []byte(`[{"type":"function","function":{"name":"f"}}]`), []byte(`{"enable_thinking":false}`), uint8(0))
	f.Add([]byte(`[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]}]`), []byte(``), []byte(``), uint8(3))
	f.Add([]byte(`[{"role":"developer","content":[{"type":"image_url","image_url":{"url":"x"}},{"type":"text","text":"\ud83d\ude00"}]}]`), []byte(`null`), []byte(`null`), uint8(14))
	f.Fuzz(func(t *testing.T, messages, tools, kwargs []byte, flags uint8) {
		in := &Input{Messages: messages, Tools: tools, ChatTemplateKwargs: kwargs}
		if flags&1 != 0 {
			in.AddGenerationPrompt = new(flags&2 != 0)
		}
		if flags&4 != 0 {
			in.ContinueFinalMessage = new(flags&8 != 0)
		}
		for _, tmpl := range []*Template{tmpl, vision} {
			first, err := tmpl.Render(in)
			var failure *Error
			if errors.As(err, &failure) && failure.Kind == Panicked {
				t.Fatal(err)
			}
			second, err2 := tmpl.Render(in)
			if (err == nil) != (err2 == nil) || string(first.Text) != string(second.Text) {
				t.Errorf("two renders differ: %q, %v and %q, %v", first.Text, err, second.Text, err2)
			}
			for _, m := range first.Media {
				if m.Placed && (m.Start < 0 || m.End < m.Start || m.End > len(first.Text)) {
					t.Errorf("medium at %d:%d of %d bytes", m.Start, m.End, len(first.Text))
				}
			}
		}
	})
}
