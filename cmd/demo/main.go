// Command demo shows what prefix routing gains: it starts simulated replicas and a real gateway in front of them, and has many clients hold
// conversations through it, first with round robin, then, on fresh replicas, with prefix routing. It ends with a table of both, and
// with an exit code other than 0 if prefix routing was not better.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	// The programs are told to end when the thread that started them does: it must be one that lives as long as this program.
	runtime.LockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	interrupted := ctx.Err() != nil
	stop()
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
	case interrupted:
		fmt.Fprintln(os.Stderr, "demo: interrupted; everything it started has ended")
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// flags are the command line.
type flags struct {
	bin, model, policy string
	replicas           int
	prefillRate        float64
	decodeRate         float64
	numBlocks          int
	verbose            bool
	shape              shape
}

func parse(args []string, stderr io.Writer) (*flags, error) {
	f := &flags{}
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&f.bin, "bin", "", "`folder` of the programs gateway and vllmsim (default: this program's)")
	fs.StringVar(&f.model, "model", "models/prefixgate-demo", "`folder` of the model's tokenizer and chat template")
	fs.StringVar(&f.policy, "policy", "least-ttft", "`policy` to compare with round-robin")
	fs.IntVar(&f.replicas, "replicas", 4, "`number` of replicas")
	fs.Float64Var(&f.prefillRate, "prefill-rate", 5000, "prompt `tokens` that a replica computes in a second")
	fs.Float64Var(&f.decodeRate, "decode-rate", 80, "`tokens` a second of each answer")
	fs.IntVar(&f.numBlocks, "num-blocks", 16384, "`blocks` of 16 tokens in each replica's KV cache")
	fs.BoolVar(&f.verbose, "v", false, "show the programs' logs")
	s := &f.shape
	fs.Uint64Var(&s.seed, "seed", 1, "varies the workload")
	fs.IntVar(&s.clients, "clients", 40, "`number` of conversations")
	fs.IntVar(&s.turns, "turns", 6, "`requests` of each conversation")
	fs.IntVar(&s.systems, "systems", 8, "`number` of system prompts that the conversations share")
	fs.IntVar(&s.systemWords, "system-words", 930, "mean `words` of a system prompt")
	fs.IntVar(&s.questionWords, "question-words", 300, "mean `words` of a question")
	fs.IntVar(&s.answerTokens, "answer-tokens", 40, "mean `tokens` of an answer")
	fs.DurationVar(&s.meanThink, "think", 400*time.Millisecond, "mean `time` between answer and next question")
	fs.DurationVar(&s.rampUp, "ramp-up", 2*time.Second, "`time` over which the conversations begin")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	switch {
	case fs.NArg() > 0:
		return nil, fmt.Errorf("unexpected argument %q: all settings are flags", fs.Arg(0))
	case f.replicas < 1 || s.clients < 1 || s.turns < 1 || s.systems < 1 || s.systemWords < 1 || s.questionWords < 1 || s.answerTokens < 2:
		return nil, errors.New("numbers of replicas, clients, turns, systems, words and tokens must be at least 1, of answer tokens 2")
	case s.meanThink < 0 || s.rampUp < 0:
		return nil, errors.New("times must not be negative")
	}
	return f, nil
}

// modelName is the name under which the replicas serve the model.
const modelName = "prefixgate-demo"

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if f.bin, err = programs(f.bin, "gateway", "vllmsim"); err != nil {
		return err
	}
	if f.model, err = filepath.Abs(f.model); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	if _, err := os.Stat(filepath.Join(f.model, "tokenizer.json")); err != nil {
		return fmt.Errorf("model: %w: run this in the repository's root, or name a folder with -model", err)
	}
	w := newWorkload(f.shape)
	fmt.Fprintf(stdout, "%d simulated replicas that compute %.0f prompt tokens/s each, one gateway, %d conversations of %d turns over %d shared system prompts\n\n",
		f.replicas, f.prefillRate, len(w.conversations), f.shape.turns, len(w.systems))
	before, err := half(ctx, f, "round-robin", &w, stdout, stderr)
	if err != nil {
		return err
	}
	after, err := half(ctx, f, f.policy, &w, stdout, stderr)
	if err != nil {
		return err
	}
	fmt.Fprintln(stdout)
	table(stdout, before, after)
	fmt.Fprintln(stdout)
	if p := problems(before, after); p != nil {
		return errors.New("prefix routing did not win:\n  " + strings.Join(p, "\n  "))
	}
	fmt.Fprintf(stdout, "Prefix routing won: the first token came after %s instead of %s in the mean.\n", millis(after.mean), millis(before.mean))
	return nil
}

// startTimeout bounds the start of all programs of a half.
const startTimeout = 60 * time.Second

// half runs the workload once, on fresh replicas behind a fresh gateway.
func half(ctx context.Context, f *flags, policy string, w *workload, stdout, stderr io.Writer) (summary, error) {
	programs := &fleet{bin: f.bin}
	if f.verbose {
		programs.log = stderr
	}
	defer programs.stop()
	dir, err := os.MkdirTemp("", "prefixgate-demo-")
	if err != nil {
		return summary{}, fmt.Errorf("make a folder for the configuration: %w", err)
	}
	defer os.RemoveAll(dir)

	starting, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: len(w.conversations)}}
	defer client.CloseIdleConnections()
	url, err := startAll(starting, f, policy, programs, client, dir)
	if err != nil {
		return summary{}, err
	}

	show := newProgress(stdout, policy, w.requests())
	playing, cancelPlaying := context.WithCancelCause(ctx)
	defer cancelPlaying(nil)
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		for pause(playing, 200*time.Millisecond) {
			show.draw(false)
			if err := programs.failed(); err != nil {
				cancelPlaying(err)
			}
		}
	}()
	begin := time.Now()
	p := &player{url: url, model: modelName, client: client, report: show.add}
	results := p.play(playing, w)
	took := time.Since(begin)
	cause := context.Cause(playing)
	cancelPlaying(nil)
	<-watching
	show.draw(true)
	if cause != nil {
		return summary{}, cause
	}
	return summarize(policy, results, f.replicas, took), nil
}

// startAll starts the replicas and the gateway, and returns the gateway's base URL when it is ready.
func startAll(ctx context.Context, f *flags, policy string, programs *fleet, client *http.Client, dir string) (string, error) {
	var replicas []*process
	for i := range f.replicas {
		p, err := programs.start(fmt.Sprintf("replica %d", i+1), "vllmsim",
			"-listen", "127.0.0.1:0", "-model", f.model, "-served-model-name", modelName, "-num-blocks", strconv.Itoa(f.numBlocks),
			"-prefill-rate", fmt.Sprint(f.prefillRate), "-decode-rate", fmt.Sprint(f.decodeRate))
		if err != nil {
			return "", err
		}
		replicas = append(replicas, p)
	}
	var urls []string
	for _, p := range replicas {
		url, err := p.address(ctx)
		if err != nil {
			return "", err
		}
		urls = append(urls, url)
	}
	config := filepath.Join(dir, "gateway.yaml")
	if err := os.WriteFile(config, []byte(gatewayConfig(f.model, policy, urls)), 0o600); err != nil {
		return "", fmt.Errorf("write the gateway's configuration: %w", err)
	}
	gateway, err := programs.start("gateway", "gateway", "-config", config)
	if err != nil {
		return "", err
	}
	url, err := gateway.address(ctx)
	if err != nil {
		return "", err
	}
	if err := ready(ctx, client, url+"/readyz"); err != nil {
		return "", err
	}
	return url, nil
}

// gatewayConfig is what an operator would write, plus the headers that show each decision.
func gatewayConfig(model, policy string, replicas []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `server:
  listen: 127.0.0.1:0
  debug_headers: true
  drain_delay: -1s
log:
  access: false
models:
  - name: %s
    tokenizer:
      model: %q
route:
  policy: %s
fleet:
  replicas:
`, modelName, model, policy)
	for _, url := range replicas {
		fmt.Fprintf(&b, "    - url: %s\n", url)
	}
	return b.String()
}

// progress shows how far a half has come: on a terminal a line that changes, else a line now and then.
type progress struct {
	w        io.Writer
	policy   string
	total    int
	terminal bool
	begin    time.Time
	drawn    time.Time // by draw only

	done, failed, prompt, cached, ttft atomic.Int64
}

func newProgress(w io.Writer, policy string, total int) *progress {
	p := &progress{w: w, policy: policy, total: total, begin: time.Now()}
	if f, ok := w.(*os.File); ok {
		if info, err := f.Stat(); err == nil {
			p.terminal = info.Mode()&os.ModeCharDevice != 0
		}
	}
	return p
}

// add counts one result; it may be called while draw runs.
func (p *progress) add(r result) {
	p.done.Add(1)
	if r.err != nil {
		p.failed.Add(1)
		return
	}
	p.prompt.Add(int64(r.prompt))
	p.cached.Add(int64(r.cached))
	p.ttft.Add(int64(r.ttft))
}

// plainInterval is the time between two lines where they stay.
const plainInterval = 2 * time.Second

// draw shows the present state; last ends the line.
func (p *progress) draw(last bool) {
	now := time.Now()
	if !p.terminal && !last && now.Sub(p.drawn) < plainInterval {
		return
	}
	p.drawn = now
	done, failed := p.done.Load(), p.failed.Load()
	mean := time.Duration(0)
	if n := done - failed; n > 0 {
		mean = time.Duration(p.ttft.Load() / n)
	}
	const width = 24
	filled := int(done) * width / max(p.total, 1)
	line := fmt.Sprintf("%-12s [%s%s] %3d/%d requests  %5.1f s  hit rate %s  mean TTFT %s",
		p.policy, strings.Repeat("#", filled), strings.Repeat(".", width-filled), done, p.total, now.Sub(p.begin).Seconds(),
		percent(ratio(int(p.cached.Load()), int(p.prompt.Load()))), millis(mean))
	if failed > 0 {
		line += fmt.Sprintf("  %d FAILED", failed)
	}
	switch {
	case p.terminal && last:
		fmt.Fprintf(p.w, "\r\x1b[K%s\n", line)
	case p.terminal:
		fmt.Fprintf(p.w, "\r\x1b[K%s", line)
	default:
		fmt.Fprintln(p.w, line)
	}
}
