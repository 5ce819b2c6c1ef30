// Command vllmsim is a simulated vLLM replica: it answers like one, at the speed and from the cache that one would have, on a machine
// without a GPU. It serves demonstrations, benchmarks and tests of the gateway.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"prefixgate/internal/sim/simhttp"
	"prefixgate/internal/tokenize"

	"github.com/prometheus/client_golang/prometheus"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "vllmsim:", err)
		os.Exit(1)
	}
}

// flags are the command line.
type flags struct {
	model        string
	startupDelay time.Duration
	grace        time.Duration
	failAfter    int
	workers      int
	cacheMB      int64
	logLevel     slog.Level
	listen       string
	host         string
	port         int
	names        list
	adapters     list
	server       simhttp.Options
}

// list is a flag that can be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func parse(args []string, stderr io.Writer) (*flags, error) {
	f := &flags{}
	fs := flag.NewFlagSet("vllmsim", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&f.model, "model", "models/prefixgate-demo", "`folder` with the model's tokenizer.json and chat template, or a name on the hub")
	fs.Var(&f.names, "served-model-name", "`name` the model is served under; further ones are aliases (default: the model as given)")
	fs.StringVar(&f.listen, "listen", "", "`address` to listen on, host:port; port 0 takes a free one (default: --host and --port)")
	fs.StringVar(&f.host, "host", "127.0.0.1", "`host` to listen on")
	fs.IntVar(&f.port, "port", 8000, "`port` to listen on")
	e := &f.server.Engine
	fs.IntVar(&e.BlockTokens, "block-size", 16, "size of a KV cache block in `tokens`")
	fs.IntVar(&e.NumBlocks, "num-blocks", 8192, "size of the KV cache in `blocks`")
	fs.Float64Var(&e.PrefillRate, "prefill-rate", 8000, "uncached prompt `tokens` computed in a second; +Inf: at once")
	fs.Float64Var(&e.DecodeRate, "decode-rate", 50, "`tokens` a second that each running request generates; +Inf: at once")
	fs.IntVar(&e.MaxRunning, "max-num-seqs", 256, "`requests` that can run at once")
	fs.IntVar(&f.server.MaxModelLen, "max-model-len", 0, "longest prompt and answer together, in `tokens` (default: 131072, or what the KV cache holds)")
	fs.IntVar(&f.server.AnswerTokens, "answer-tokens", 64, "mean length of an answer that ends by itself, in `tokens`")
	fs.Uint64Var(&f.server.Seed, "seed", 0, "varies the answers")
	fs.BoolVar(&f.server.Multimodal, "multimodal", false, "accept images")
	fs.Var(&f.adapters, "lora", "LoRA adapter to serve, `name=path`; can be given several times")
	fs.DurationVar(&f.startupDelay, "startup-delay", 0, "`time` before it listens, as for loading weights")
	fs.IntVar(&f.failAfter, "fail-after", -1, "reset every stream after so many `tokens` (default: never)")
	fs.DurationVar(&f.grace, "grace", 5*time.Second, "`time` that running requests have to end after SIGTERM")
	fs.IntVar(&f.workers, "tokenizer-workers", 1, "`threads` that tokenize")
	fs.Int64Var(&f.cacheMB, "tokenizer-cache", 32, "memory for text that was tokenized before, in `MiB`")
	fs.TextVar(&f.logLevel, "log-level", slog.LevelInfo, "`level` from which on is logged: debug, info, warn or error")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q: all settings are flags", fs.Arg(0))
	}
	for _, r := range []float64{e.PrefillRate, e.DecodeRate} {
		if r <= 0 || math.IsNaN(r) {
			return nil, fmt.Errorf("got a rate of %v tokens per second, want more than 0 for --prefill-rate and --decode-rate", r)
		}
	}
	f.server.Model = f.model
	if len(f.names) > 0 {
		f.server.Model, f.server.Aliases = f.names[0], f.names[1:]
	}
	f.server.Root = f.model
	f.server.Adapters = make(map[string]string)
	for _, a := range f.adapters {
		name, path, _ := strings.Cut(a, "=")
		if name == "" {
			return nil, fmt.Errorf("--lora: got %q, want name=path", a)
		}
		f.server.Adapters[name] = path
	}
	f.server.Listen = f.listen
	if f.listen == "" {
		f.server.Listen = net.JoinHostPort(f.host, strconv.Itoa(f.port))
	}
	return f, nil
}

// run serves until ctx is done.
func run(ctx context.Context, args []string, stderr io.Writer) error {
	f, err := parse(args, stderr)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: f.logLevel}))
	// The tokenizer may take its time: a replica refuses nothing for being busy.
	model, err := tokenize.Load(ctx, tokenize.Options{
		Model: f.model, Mode: tokenize.ModeLocal, Timeout: time.Minute, Workers: f.workers, CacheBytes: f.cacheMB << 20,
	}, log, prometheus.NewRegistry())
	if err != nil {
		return fmt.Errorf("load tokenizer: %w", err)
	}
	defer model.Close()
	f.server.Tokenizer = model
	if file := filepath.Join(f.model, "tokenizer.json"); exists(file) {
		f.server.TokenizerFile = file
	} else if strings.HasSuffix(f.model, ".json") {
		f.server.TokenizerFile = f.model
	}
	f.server.Logger = log
	select {
	case <-time.After(f.startupDelay):
	case <-ctx.Done():
		return nil
	}
	server, err := simhttp.New(ctx, f.server)
	if err != nil {
		return err
	}
	if f.failAfter >= 0 {
		server.SetFault(simhttp.Fault{Kind: simhttp.FaultCut, AfterTokens: f.failAfter})
	}
	<-ctx.Done()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.grace)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		log.Warn("requests were broken off", "err", err)
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
