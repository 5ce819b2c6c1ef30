package tokenize

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"prefixgate/internal/openai"
	"prefixgate/internal/testenv"

	"github.com/prometheus/client_golang/prometheus"
)

func demoModel() string { return filepath.Join(testenv.Root(), "models", "prefixgate-demo") }

func testLog(tb testing.TB) *slog.Logger {
	tb.Helper()
	return slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func load(tb testing.TB, opts Options) *Model {
	tb.Helper()
	m, err := Load(tb.Context(), opts, testLog(tb), prometheus.NewRegistry())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = m.Close() })
	return m
}

func parse(tb testing.TB, ep openai.Endpoint, body string) *openai.Request {
	tb.Helper()
	req, err := openai.Parse(ep, []byte(body))
	if err != nil {
		tb.Fatal(err)
	}
	return req
}

// publicTokenizers names every real tokenizer that tests use, with what is expected of it.
var publicTokenizers = [...]struct {
	name    string
	encoder encoderName
	cuts    []cutKind
	// framed are the ids of "Hello" as a completion.
	framed []uint32
}{
	{"prefixgate-demo", nameFastokens, []cutKind{cutSpecial, cutNewline, cutSpace}, nil},
	{"qwen3", nameFastokens, allCutKinds[:], []uint32{9707}},
	{"llama3_1", nameFastokens, allCutKinds[:], []uint32{128000, 9906}},
	{"gptoss", nameFastokens, allCutKinds[:], []uint32{13225}},
	// tokenizer.json has no rule for special tokens, but transformers makes one for this class.
	{"deepseek_v3", nameFastokens, allCutKinds[:], []uint32{0, 19923}},
	{"gemma3", nameFastokens, allCutKinds[:], []uint32{2, 9259}},
	{"Meta-Llama-3-8B-Instruct", nameFastokens, allCutKinds[:], []uint32{128000, 9906}},
	{"cohere-tokenizer", nameFastokens, allCutKinds[:], nil},
	{"bert-base-uncased", nameHuggingFace, allCutKinds[:], []uint32{101, 7592, 102}},
}

// tokenizerPath returns the tokenizer.json of a public tokenizer.
func tokenizerPath(tb testing.TB, name string) string {
	tb.Helper()
	switch name {
	case "prefixgate-demo":
		return filepath.Join(demoModel(), fileTokenizer)
	case "Meta-Llama-3-8B-Instruct", "cohere-tokenizer", "bert-base-uncased":
		return testenv.GoModuleTokenizer(tb, name+".json")
	}
	return filepath.Join(testenv.Tokenizer(tb, name), fileTokenizer)
}

// pair is a loaded model and HuggingFace's encoder of the same file, which says what is right.
type pair struct {
	model     *Model
	reference *encoder
}

var pairs struct {
	sync.Mutex
	byName map[string]*pair
}

// loadPair loads a public tokenizer, once for all tests: the largest take seconds.
func loadPair(tb testing.TB, name string) *pair {
	tb.Helper()
	path := tokenizerPath(tb, name)
	pairs.Lock()
	defer pairs.Unlock()
	if p := pairs.byName[name]; p != nil {
		return p
	}
	data, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	p := new(pair)
	if p.reference, err = newHuggingFace(data, nil); err != nil {
		tb.Fatal(err)
	}
	if p.model, err = Load(tb.Context(), Options{Model: path, Timeout: time.Minute}, testLog(tb), prometheus.NewRegistry()); err != nil {
		tb.Fatal(err)
	}
	if pairs.byName == nil {
		pairs.byName = map[string]*pair{}
	}
	pairs.byName[name] = p
	return p
}

func TestPublicTokenizers(t *testing.T) {
	for _, want := range publicTokenizers {
		t.Run(want.name, func(t *testing.T) {
			m := loadPair(t, want.name).model
			if m.encoderName != want.encoder {
				t.Errorf("encoder = %s, want %s", m.encoderName, want.encoder)
			}
			if !slices.Equal(m.cutKinds, want.cuts) {
				t.Errorf("kinds of cuts = %v, want %v", m.cutKinds, want.cuts)
			}
			enc, err := m.Encode(context.Background(), parse(t, openai.Completions, `{"model":"m","prompt":"Hello"}`))
			if err != nil {
				t.Fatal(err)
			}
			if got := enc.Prompts[0].IDs; want.framed != nil && !slices.Equal(got, want.framed) {
				t.Errorf(`"Hello" as a completion = %v, want %v`, got, want.framed)
			}
		})
	}
}
