package tokenize

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"prefixgate/internal/openai"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// A hundred and twenty-eight goroutines encode while the model is closed and loaded anew under them, as a reload does.
func TestEncodeCloseReload(t *testing.T) {
	reg := prometheus.NewRegistry()
	log := slog.New(slog.DiscardHandler)
	make1 := func() *Model {
		m, err := Load(t.Context(), Options{Model: demoModel(), CacheBytes: 1 << 20, Timeout: time.Minute}, log, reg)
		if err != nil {
			t.Error(err)
		}
		return m
	}
	maker := newTextMaker(t, 5)
	texts := make([]*openai.Request, 40)
	want := make([][]uint32, len(texts))
	models := make([]*Model, 6)
	for i := range models {
		models[i] = make1()
	}
	first := models[0]
	for i := range texts {
		body, err := json.Marshal(map[string]any{"prompt": maker.text(50 + i*300)})
		if err != nil {
			t.Fatal(err)
		}
		texts[i] = parse(t, openai.Completions, string(body))
		if want[i], err = first.encoder.encode(nil, texts[i].Prompts[0].Text, false); err != nil {
			t.Fatal(err)
		}
	}
	var current atomic.Pointer[Model]
	current.Store(first)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var encoded, closed atomic.Int64
	for g := range 128 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(g)))
			for {
				select {
				case <-stop:
					return
				default:
				}
				i := rng.IntN(len(texts))
				ctx, cancel := context.WithCancel(context.Background())
				if rng.IntN(10) == 0 {
					cancel()
				}
				enc, err := current.Load().Encode(ctx, texts[i])
				cancel()
				var u *Unsupported
				switch {
				case err == nil:
					encoded.Add(1)
					if !slices.Equal(enc.Prompts[0].IDs, want[i]) {
						t.Errorf("text %d has other ids than alone", i)
						return
					}
				case errors.As(err, &u) && u.Reason == ReasonClosed:
					closed.Add(1)
				case errors.As(err, &u) && u.Reason == ReasonCanceled:
				default:
					t.Errorf("Encode = %v", err)
					return
				}
			}
		})
	}
	for _, next := range models[1:] {
		for target := encoded.Load() + 500; encoded.Load() < target && !t.Failed(); {
			runtime.Gosched()
		}
		old := current.Swap(next)
		if err := old.Close(); err != nil {
			t.Error(err)
		}
		if err := old.Close(); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
	if encoded.Load() == 0 {
		t.Error("nothing was encoded")
	}
	_ = current.Load().Close()
	// Gauges are back where they were.
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		switch f.GetName() {
		case "prefixgate_tokenizer_cache_bytes", "prefixgate_tokenizer_cache_max_bytes", "prefixgate_tokenizer_cache_entries", "prefixgate_tokenizer_workers", "prefixgate_tokenizer_workers_busy", "prefixgate_tokenizer_info", "prefixgate_tokenizer_cut_kinds":
			for _, metric := range f.GetMetric() {
				if v := metric.GetGauge().GetValue(); v != 0 {
					t.Errorf("%s = %v after all models were closed, want 0", f.GetName(), v)
				}
			}
		}
	}
}

// A wrong file must end the start with an error that names it, not the process and not the first request.
func TestLoadRefusesWrongFiles(t *testing.T) {
	good, err := os.ReadFile(filepath.Join(demoModel(), fileTokenizer))
	if err != nil {
		t.Fatal(err)
	}
	for name, files := range map[string]map[string]string{
		"empty":           {fileTokenizer: ""},
		"cut off":         {fileTokenizer: string(good[:len(good)/2])},
		"not JSON":        {fileTokenizer: "\x00\x01\x02"},
		"another JSON":    {fileTokenizer: `{"model_type": "llama"}`},
		"unknown model":   {fileTokenizer: `{"model": {"type": "Nothing", "vocab": {"a": 0}}}`},
		"pointer":         {fileTokenizer: "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"},
		"bad vocabulary":  {fileTokenizer: strings.Replace(string(good), `"vocab":`, `"vocab":7,"x":`, 1)},
		"bad config":      {fileTokenizer: string(good), fileConfig: "{"},
		"config of texts": {fileTokenizer: string(good), fileConfig: `{"added_tokens_decoder": {"x": {"content": "<new>"}}}`},
		"wrong token id":  {fileTokenizer: string(good), fileConfig: `{"added_tokens_decoder": {"7": {"content": "<new>"}}}`},
		"bad model":       {fileTokenizer: string(good), fileModel: "[]"},
		"nothing":         {},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			m, err := Load(t.Context(), Options{Model: dir}, testLog(t), nil)
			if err == nil {
				_ = m.Close()
				t.Fatal("Load of a wrong file = no error")
			}
			if !strings.Contains(err.Error(), dir) {
				t.Errorf("error %q does not name the file", err)
			}
		})
	}
	if _, err := Load(t.Context(), Options{}, testLog(t), nil); err == nil || !strings.Contains(err.Error(), "model") {
		t.Errorf("Load without a model = %v", err)
	}
	if _, err := Load(t.Context(), Options{Model: demoModel(), ChatTemplate: "/does/not/exist.jinja"}, testLog(t), nil); err == nil || !strings.Contains(err.Error(), "exist.jinja") {
		t.Errorf("Load with a missing chat template = %v", err)
	}
}

// A chat template that does not compile leaves completions as they are.
func TestBrokenTemplateLeavesCompletions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "broken.jinja")
	if err := os.WriteFile(path, []byte("{% if %}"), 0o600); err != nil {
		t.Fatal(err)
	}
	m := load(t, Options{Model: demoModel(), ChatTemplate: path})
	if _, err := m.Encode(t.Context(), parse(t, openai.Completions, `{"prompt":"x"}`)); err != nil {
		t.Errorf("completion = %v", err)
	}
	var u *Unsupported
	if _, err := m.Encode(t.Context(), parse(t, openai.Chat, `{"messages":[{"role":"user","content":"x"}]}`)); !errors.As(err, &u) || u.Reason != ReasonNoTemplate {
		t.Errorf("chat = %v, want reason %s", err, ReasonNoTemplate)
	}
	if got := testutil.ToFloat64(m.metrics.unsupported.WithLabelValues(m.opts.Name, string(ReasonNoTemplate))); got != 1 {
		t.Errorf("unsupported_total{no_template} = %v, want 1", got)
	}
}

// Tokens that only tokenizer_config.json declares are special tokens all the same.
func TestTokensOfTheConfigurationAreAdded(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{fileTokenizer, fileTemplate} {
		data, err := os.ReadFile(filepath.Join(demoModel(), name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config := `{"added_tokens_decoder": {"4095": {"content": "<|new_one|>", "special": true}, "4096": {"content": "<|new_two|>"}}}`
	if err := os.WriteFile(filepath.Join(dir, fileConfig), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	m := load(t, Options{Model: dir})
	if m.encoderName != nameFastokens {
		t.Errorf("encoder = %s, want %s", m.encoderName, nameFastokens)
	}
	enc, err := m.Encode(t.Context(), parse(t, openai.Completions, `{"prompt":"<|new_two|><|new_one|>"}`))
	if err != nil || !slices.Equal(enc.Prompts[0].IDs, []uint32{4096, 4095}) {
		t.Errorf("the new tokens = %v, %v, want [4096 4095]", enc, err)
	}
	if plain := load(t, Options{Model: demoModel()}); plain.Fingerprint() == m.Fingerprint() {
		t.Error("a tokenizer with more tokens has the same fingerprint")
	}
}

func TestFingerprintIsOfTheContents(t *testing.T) {
	a, b := load(t, Options{Model: demoModel(), Name: "a"}), load(t, Options{Model: filepath.Join(demoModel(), fileTokenizer), Name: "b", Encoder: EncoderHuggingFace})
	if a.Fingerprint() != b.Fingerprint() {
		t.Error("one tokenizer has two fingerprints")
	}
	c := loadPair(t, "bert-base-uncased").model
	if a.Fingerprint() == c.Fingerprint() {
		t.Error("two tokenizers have one fingerprint")
	}
}

// Texts that upset tokenizers: the budget holds for each, and others are served meanwhile.
func TestOddMegabytes(t *testing.T) {
	for _, name := range []string{"qwen3", "bert-base-uncased"} {
		t.Run(name, func(t *testing.T) {
			m, reference := loadPair(t, name).model, loadPair(t, name).reference
			for _, piece := range []string{"^", "a", " ", "😀", "\n", "ab1", "你", "\r\n", "'s", "\u0301", "<|", "aGVsbG8gd29ybGQ+/0"} {
				text := strings.Repeat(piece, 1<<20/len(piece))
				ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				start := time.Now()
				ids, err := m.encodeText(ctx, nil, text, false, 0)
				took := time.Since(start)
				cancel()
				var u *Unsupported
				if err != nil && (!errors.As(err, &u) || u.Reason != ReasonTimeout) {
					t.Errorf("1 MB of %q = %v, want ids or a timeout", piece, err)
				}
				t.Logf("1 MB of %q: %d ids, %v, %v", piece, len(ids), err, took.Round(time.Millisecond))
				if err == nil && name == "qwen3" && len(piece) < 3 {
					want, err := reference.encode(nil, text, false)
					if err != nil || !slices.Equal(ids, want) {
						t.Errorf("1 MB of %q has other ids than HuggingFace's, %v", piece, err)
					}
				}
			}
			// Whatever was given up on ends, and the threads are free for the next.
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, err := m.encodeText(ctx, nil, "and now a short one", false, 0); err != nil {
				t.Errorf("a short text afterwards = %v", err)
			}
		})
	}
}

// fakeRemote answers as a replica with the tokenizer of m would, as far as the tests ask.
type fakeRemote struct {
	answer func(ctx context.Context, body []byte) ([]uint32, error)
	calls  atomic.Int32
	bodies chan string
}

func (r *fakeRemote) Tokenize(ctx context.Context, body []byte) ([]uint32, error) {
	r.calls.Add(1)
	if r.bodies != nil {
		r.bodies <- string(body)
	}
	return r.answer(ctx, body)
}

func TestRemote(t *testing.T) {
	remote := &fakeRemote{bodies: make(chan string, 10), answer: func(context.Context, []byte) ([]uint32, error) { return []uint32{1, 2, 3, 4}, nil }}
	dir := t.TempDir()
	data, err := os.ReadFile(filepath.Join(demoModel(), fileTokenizer))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{fileTokenizer: data, fileModel: []byte(`{"model_type":"gpt_oss"}`)} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := load(t, Options{Model: dir, Name: "gptoss", Remote: remote, Timeout: time.Minute})
	if m.chat != placeRemote || m.completions != placeLocal {
		t.Fatalf("gpt-oss: chat %s, completions %s, want remote and local", m.chat, m.completions)
	}
	chat := parse(t, openai.Chat, `{"model":"served name","messages":[{"role":"user","content":"H\u00e9"}],"reasoning_effort":"high","temperature":1,"tools":[`+weather+`]}`)
	for range 3 {
		enc, err := m.Encode(t.Context(), chat)
		if err != nil || !slices.Equal(enc.Prompts[0].IDs, []uint32{1, 2, 3, 4}) {
			t.Fatalf("Encode = %v, %v", enc, err)
		}
	}
	if remote.calls.Load() != 1 {
		t.Errorf("the replica was asked %d times for one prompt, want once", remote.calls.Load())
	}
	if got, want := <-remote.bodies, `{"model":"served name","messages":[{"role":"user","content":"H\u00e9"}],"tools":[`+weather+`],"reasoning_effort":"high"}`; got != want {
		t.Errorf("asked with %s, want %s", got, want)
	}
	if got := testutil.ToFloat64(m.metrics.remote.WithLabelValues("gptoss", remoteCached)); got != 2 {
		t.Errorf("remote_requests_total{cached} = %v, want 2", got)
	}

	// Completions need no replica, and truncation keeps the last.
	if _, err := m.Encode(t.Context(), parse(t, openai.Completions, `{"prompt":"x"}`)); err != nil || remote.calls.Load() != 1 {
		t.Errorf("completion = %v after %d calls", err, remote.calls.Load())
	}
	chat = parse(t, openai.Chat, `{"model":"m","messages":[{"role":"user","content":"y"}],"truncate_prompt_tokens":2}`)
	if enc, err := m.Encode(t.Context(), chat); err != nil || !slices.Equal(enc.Prompts[0].IDs, []uint32{3, 4}) {
		t.Errorf("truncated = %v, %v, want the last two", enc, err)
	}
}

func TestRemoteFailuresAreBounded(t *testing.T) {
	gate := make(chan struct{})
	remote := &fakeRemote{answer: func(ctx context.Context, _ []byte) ([]uint32, error) {
		select {
		case <-gate:
			return nil, errors.New("503")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}}
	m := load(t, Options{Mode: ModeRemote, Name: "m", Remote: remote, RemoteConcurrency: 2, RemoteTimeout: 30 * time.Millisecond})
	reason := func(i int) Reason {
		var u *Unsupported
		_, err := m.Encode(t.Context(), parse(t, openai.Completions, `{"prompt":"`+strings.Repeat("x", i+1)+`"}`))
		if !errors.As(err, &u) {
			t.Errorf("Encode = %v, want an *Unsupported", err)
			return ""
		}
		return u.Reason
	}
	var wg sync.WaitGroup
	var busy, failed atomic.Int32
	for i := range 20 {
		wg.Go(func() {
			switch reason(i) {
			case ReasonRemoteBusy:
				busy.Add(1)
			case ReasonRemote:
				failed.Add(1)
			}
		})
	}
	wg.Wait()
	if busy.Load()+failed.Load() != 20 || failed.Load() == 0 {
		t.Errorf("%d busy and %d failed of 20", busy.Load(), failed.Load())
	}
	close(gate)
	if got := reason(99); got != ReasonRemote {
		t.Errorf("a failing replica = %s, want %s", got, ReasonRemote)
	}
	if _, err := Load(t.Context(), Options{Mode: ModeRemote, Name: "m"}, testLog(t), nil); err == nil {
		t.Error("mode remote without a replica = no error")
	}
}

func TestOffTakesTokenIDs(t *testing.T) {
	m := load(t, Options{Mode: ModeOff, Name: "m"})
	if enc, err := m.Encode(t.Context(), parse(t, openai.Completions, `{"prompt":[1,2]}`)); err != nil || len(enc.Prompts[0].IDs) != 2 {
		t.Errorf("token ids = %v, %v, want them as they stand", enc, err)
	}
	for ep, body := range map[openai.Endpoint]string{
		openai.Completions: `{"prompt":"x"}`, openai.Chat: `{"messages":[{"role":"user","content":"x"}]}`,
	} {
		var u *Unsupported
		if _, err := m.Encode(t.Context(), parse(t, ep, body)); !errors.As(err, &u) || u.Reason != ReasonOff {
			t.Errorf("%v = %v, want reason %s", ep, err, ReasonOff)
		}
	}
}

func TestForeignFamilies(t *testing.T) {
	tokenizer, err := os.ReadFile(filepath.Join(demoModel(), fileTokenizer))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name              string
		files             map[string]string
		chat, completions place
	}{
		{"harmony", map[string]string{fileModel: `{"model_type":"gpt_oss"}`}, placeOff, placeLocal},
		{"deepseek", map[string]string{fileModel: `{"architectures":["DeepseekV32ForCausalLM"],"model_type":"x"}`}, placeOff, placeLocal},
		{"mistral beside", map[string]string{fileTekken: "{}"}, placeOff, placeOff},
		{"mistral alone", map[string]string{fileMistral: "{}", fileTokenizer: ""}, placeOff, placeOff},
		{"usual", map[string]string{fileModel: `{"model_type":"qwen3"}`, fileTemplate: "{{ messages[0].content }}"}, placeLocal, placeLocal},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if _, set := c.files[fileTokenizer]; !set {
				c.files[fileTokenizer] = string(tokenizer)
			}
			for name, text := range c.files {
				if text == "" {
					continue
				}
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if m := load(t, Options{Model: dir}); m.chat != c.chat || m.completions != c.completions {
				t.Errorf("chat %s, completions %s, want %s, %s", m.chat, m.completions, c.chat, c.completions)
			}
		})
	}
}

func TestSelfCheck(t *testing.T) {
	m := load(t, Options{Model: demoModel(), Name: "demo"})
	// A replica of the same model, whose template trims what users say.
	dir := t.TempDir()
	for _, name := range []string{fileTokenizer, fileConfig} {
		data, err := os.ReadFile(filepath.Join(demoModel(), name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	replica := m
	remote := &fakeRemote{answer: func(ctx context.Context, body []byte) ([]uint32, error) {
		ep := openai.Completions
		if strings.Contains(string(body), `"messages"`) {
			ep = openai.Chat
		}
		_, ids, err := replica.Explain(ctx, parse(t, ep, string(body)))
		return ids, err
	}}
	if got, err := m.SelfCheck(t.Context(), remote, "demo"); err != nil || len(got) > 0 {
		t.Errorf("self-check with an equal replica = %v, %v, want nothing", got, err)
	}
	if got := testutil.ToFloat64(m.metrics.selfCheck.WithLabelValues("demo", "equal")); got != float64(len(checkPrompts)) {
		t.Errorf("self_check{equal} = %v, want %d", got, len(checkPrompts))
	}
	template, err := os.ReadFile(filepath.Join(demoModel(), fileTemplate))
	if err != nil {
		t.Fatal(err)
	}
	other := strings.Replace(string(template), "{{- part.text }}", "{{- part.text | trim }}", 1)
	if err := os.WriteFile(filepath.Join(dir, fileTemplate), []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	replica = load(t, Options{Model: dir, Name: "replica"})
	got, err := m.SelfCheck(t.Context(), remote, "demo")
	if err != nil || len(got) != 1 || got[0].Prompt != "chat of several turns" || got[0].At == 0 {
		t.Errorf("self-check with another template = %v, %v, want the one prompt with white space", got, err)
	}
	remote.answer = func(context.Context, []byte) ([]uint32, error) { return nil, errors.New("404") }
	if _, err := m.SelfCheck(t.Context(), remote, "demo"); err == nil {
		t.Error("self-check with a replica that has no /tokenize = no error")
	}
}
