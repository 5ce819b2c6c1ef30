package tokenize

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"prefixgate/internal/testenv"

	"github.com/daulet/tokenizers"
)

// benchSizes are the sizes of a prompt.
var benchSizes = [...]struct {
	name  string
	bytes int
}{{"200B", 200}, {"8KB", 8 << 10}, {"64KB", 64 << 10}, {"400KB", 400 << 10}}

// benchTexts hands out the texts of one benchmark, made ahead so that making them is not measured. Texts called new share no
// long stretch with any text before.
type benchTexts struct {
	make  func() string
	texts []string
	next  int
}

func (t *benchTexts) get(b *testing.B) string { //nolint:thelper // it is measured
	if t.next == len(t.texts) {
		b.StopTimer()
		for i := range t.texts {
			t.texts[i] = t.make()
		}
		t.next = 0
		b.StartTimer()
	}
	t.next++
	return t.texts[t.next-1]
}

// BenchmarkEncode measures text to ids: HuggingFace's encoder through daulet/tokenizers, fastokens alone, and the chunk cache
// in front of fastokens with texts that are new, half new, new in their last message, or seen. scripts/bench-tokens prints it.
func BenchmarkEncode(b *testing.B) {
	name := os.Getenv("PREFIXGATE_BENCH_TOKENIZER")
	if name == "" {
		name = "qwen3"
	}
	path := filepath.Join(testenv.Tokenizer(b, name), fileTokenizer)
	data, err := os.ReadFile(path)
	if err != nil {
		b.Fatal(err)
	}
	maker := newTextMaker(b, 1)
	hf, err := tokenizers.FromBytes(data)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = hf.Close() }()
	fast, err := newFastokens(data, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer fast.close()
	m := load(b, Options{Model: path})

	ctx := context.Background()
	var dst []uint32
	var prompts [1]Prompt
	encoders := []struct {
		name   string
		encode func(text string)
	}{
		{"hf", func(text string) {
			if len(hf.EncodeWithOptions(text, false).IDs) == 0 {
				b.Fatal("no ids")
			}
		}},
		{"fast", func(text string) {
			if dst, err = fast.encode(dst[:0], text, false); err != nil {
				b.Fatal(err)
			}
		}},
		{"chunk", func(text string) {
			enc := Encoded{Prompts: prompts[:]}
			if err := m.fill(ctx, &prompts[0], text, false, 0); err != nil {
				b.Fatal(err)
			}
			enc.Release()
		}},
	}
	for _, enc := range encoders {
		for _, mode := range [...]string{"new", "half", "last", "seen"} {
			for _, size := range benchSizes {
				b.Run(enc.name+"/"+mode+"/"+size.name, func(b *testing.B) {
					seen := conversation(maker, size.bytes)
					last := min(1<<10, size.bytes/4)
					make1 := map[string]func() string{
						"new":  func() string { return conversation(maker, size.bytes) },
						"half": func() string { return seen[:cutAt(seen, size.bytes/2)] + maker.text(size.bytes/2) },
						"last": func() string { return seen[:cutAt(seen, size.bytes-last)] + maker.text(last) },
						"seen": func() string { return seen },
					}[mode]
					texts := &benchTexts{make: make1, texts: make([]string, max(1, min(256, 4<<20/size.bytes)))}
					texts.next = len(texts.texts)
					enc.encode(seen)
					b.SetBytes(int64(size.bytes))
					b.ReportAllocs()
					for b.Loop() {
						enc.encode(texts.get(b))
					}
				})
			}
		}
	}
}

// cutAt returns the last place in text up to n that is no part of a character.
func cutAt(text string, n int) int {
	for n < len(text) && n > 0 && text[n]&0xc0 == 0x80 {
		n--
	}
	return n
}

// conversation returns n bytes of messages as a chat template writes them.
func conversation(m *textMaker, n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		b.WriteString("<|im_start|>" + [...]string{"user", "assistant"}[i%2] + "\n")
		b.WriteString(m.text(min(max(n-b.Len(), 20), 100+m.rng.IntN(4000))))
		b.WriteString("<|im_end|>\n")
	}
	return b.String()[:cutAt(b.String(), n)]
}

// BenchmarkLoad measures how long loading and proving a tokenizer takes and what it leaves in memory. The memory is right for
// the first tokenizer of a process only: run one at a time.
func BenchmarkLoad(b *testing.B) {
	for _, tokenizer := range publicTokenizers {
		b.Run(tokenizer.name, func(b *testing.B) {
			path := tokenizerPath(b, tokenizer.name)
			debug.FreeOSMemory()
			base, loaded, threads := residentBytes(b), int64(0), 0
			for b.Loop() {
				m, err := Load(b.Context(), Options{Model: path, Workers: 2}, slog.New(slog.DiscardHandler), nil)
				if err != nil {
					b.Fatal(err)
				}
				if loaded == 0 {
					debug.FreeOSMemory()
					loaded, threads = residentBytes(b)-base, processThreads(b)
				}
				_ = m.Close()
			}
			b.ReportMetric(float64(loaded)/(1<<20), "MiB")
			b.ReportMetric(float64(threads), "threads")
		})
	}
}

// processThreads returns the number of threads of this process.
func processThreads(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		tb.Skip("no /proc here")
	}
	return len(entries)
}
