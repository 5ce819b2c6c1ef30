package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"prefixgate/internal/openai"
	"prefixgate/internal/replay"
	"prefixgate/internal/tokenize"
)

// source are the flags that say what is replayed.
type source struct {
	trace    string
	format   string
	workload replay.Synthetic
	model    string
	speed    float64
	limit    int
}

func (s *source) register(f *flag.FlagSet) {
	f.StringVar(&s.trace, "trace", "", "`file` to replay: a Mooncake trace or recorded prompts, JSON lines, .gz too")
	f.StringVar(&s.format, "format", "auto", "format of the trace: mooncake, prompts or auto")
	f.StringVar(&s.workload.Kind, "workload", "", "made-up workload instead of a trace: "+strings.Join(replay.Kinds(), ", "))
	f.IntVar(&s.workload.Requests, "requests", 10_000, "number of requests of a made-up workload")
	f.Float64Var(&s.workload.Rate, "rate", 0, "requests per second of a made-up workload (0: enough to keep replicas of 8000 tokens/s half busy)")
	f.IntVar(&s.workload.BlockTokens, "block-tokens", 0, "block size in tokens (0: 512 for a Mooncake trace, 16 for prompts, 64 for a made-up workload)")
	f.StringVar(&s.model, "model", "", "folder, tokenizer.json or hub name of the tokenizer of recorded prompts")
	f.Float64Var(&s.speed, "speed", 1, "how many times faster than recorded the requests arrive")
	f.IntVar(&s.limit, "limit", 0, "replay only so many requests of the trace (0: all)")
}

// workload can be read from its beginning several times.
type workload struct {
	name        string
	requests    int
	blockTokens int
	open        func() (replay.Workload, error)
}

// load reads the trace, or prepares the made-up workload. Tokens are needed only where prefixes are to be compared here.
func (s *source) load(ctx context.Context, seed uint64, replicas int, tokens bool) (*workload, error) {
	switch {
	case s.trace == "" && s.workload.Kind == "":
		return nil, usagef("want -trace FILE or -workload %s", strings.Join(replay.Kinds(), "|"))
	case s.trace != "" && s.workload.Kind != "":
		return nil, usagef("-trace and -workload exclude each other")
	case s.speed <= 0:
		return nil, usagef("-speed: got %v, want a number above 0", s.speed)
	}
	if s.workload.Kind != "" {
		syn := s.workload
		syn.Seed = seed
		if syn.Rate > 0 {
			syn.Rate *= s.speed
		}
		first, err := syn.Open(replicas)
		if err != nil {
			return nil, &usageError{err}
		}
		return &workload{
			name:        fmt.Sprintf("%d requests of made-up %s", first.Len(), syn.Kind),
			requests:    first.Len(),
			blockTokens: first.BlockTokens(),
			open:        func() (replay.Workload, error) { return syn.Open(replicas) },
		}, nil
	}
	t, err := s.read(ctx, tokens)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.trace, err)
	}
	t.Scale(s.speed, s.limit)
	w := t.Open()
	return &workload{
		name:        strings.TrimSuffix(filepath.Base(s.trace), filepath.Ext(s.trace)),
		requests:    w.Len(),
		blockTokens: w.BlockTokens(),
		open:        func() (replay.Workload, error) { return t.Open(), nil },
	}, nil
}

func (s *source) read(ctx context.Context, tokens bool) (*replay.Trace, error) {
	f, err := os.Open(s.trace)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	defer f.Close()
	in := bufio.NewReaderSize(f, 1<<20)
	if magic, _ := in.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, fmt.Errorf("decompress trace: %w", err)
		}
		in = bufio.NewReaderSize(z, 1<<20)
	}
	format := s.format
	if format == "auto" {
		format = formatOf(in)
	}
	switch format {
	case "mooncake":
		if n := s.workload.BlockTokens; n != 0 && n != 512 {
			return nil, usagef("-block-tokens: a Mooncake trace has blocks of 512 tokens, got %d", n)
		}
		return replay.ReadMooncake(in)
	case "prompts":
		blockTokens := s.workload.BlockTokens
		if blockTokens == 0 {
			blockTokens = 16
		}
		if !tokens {
			return replay.ReadPrompts(in, blockTokens, nil)
		}
		encode, closer, err := s.encoder(ctx)
		if err != nil {
			return nil, err
		}
		defer closer.Close()
		return replay.ReadPrompts(in, blockTokens, encode)
	default:
		return nil, usagef("-format: got %q, want mooncake, prompts or auto", s.format)
	}
}

// formatOf looks at the first line.
func formatOf(in *bufio.Reader) string {
	head, _ := in.Peek(1 << 16)
	line, _, _ := bytes.Cut(head, []byte("\n"))
	if bytes.Contains(line, []byte(`"hash_ids"`)) {
		return "mooncake"
	}
	return "prompts"
}

// encoder loads the tokenizer of recorded prompts.
func (s *source) encoder(ctx context.Context) (replay.Encode, io.Closer, error) {
	if s.model == "" {
		return nil, nil, usagef("recorded prompts need -model, the tokenizer by which prefixes are compared")
	}
	m, err := tokenize.Load(ctx, tokenize.Options{Model: s.model}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		return nil, nil, fmt.Errorf("load tokenizer: %w", err)
	}
	encode := func(path string, body json.RawMessage) ([]uint32, error) {
		req, err := openai.Parse(openai.EndpointOf(path), body)
		if err != nil {
			return nil, err
		}
		e, err := m.Encode(ctx, req)
		if err != nil {
			return nil, err
		}
		if len(e.Prompts) != 1 {
			return nil, fmt.Errorf("got %d prompts in one request, want 1", len(e.Prompts))
		}
		return e.Prompts[0].IDs, nil
	}
	return encode, m, nil
}
