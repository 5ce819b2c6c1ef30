package tokenize

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"prefixgate/internal/openai"
	"prefixgate/internal/testenv"
)

func demoModel() string { return filepath.Join(testenv.Root(), "models", "prefixgate-demo") }

func load(tb testing.TB, opts Options) *Model {
	tb.Helper()
	m, err := Load(context.Background(), opts, slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})), prometheus.NewRegistry())
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

func TestLoadAll(t *testing.T) {
	for name, path := range publicTokenizers(t) {
		t.Run(name, func(t *testing.T) {
			m := load(t, Options{Model: path})
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			hf, err := newHuggingFace(data, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer hf.close()
			text := "Hello, world!\nThis is it."
			enc, err := m.Encode(context.Background(), parse(t, openai.Completions, `{"model":"m","prompt":"Hello, world!\nThis is it."}`))
			if err != nil {
				t.Fatal(err)
			}
			want, err := hf.encode(nil, text, true)
			if err != nil {
				t.Fatal(err)
			}
			if name == "deepseek_v3" {
				// tokenizer.json has no template for special tokens, but transformers makes one for this class.
				want = append([]uint32{0}, want...)
			}
			if !slices.Equal(enc.Prompts[0].IDs, want) {
				t.Errorf("Encode = %v, want %v", enc.Prompts[0].IDs, want)
			}
		})
	}
}
