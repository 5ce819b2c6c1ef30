// Package simhttp serves a simulated engine over HTTP as vLLM serves a real one.
//
// In go requests as OpenAI's clients send them; out come answers in vLLM's shapes, at the times and with the cached tokens that
// package sim works out. Prompts are rendered and tokenized by the model's own tokenizer, so the cache behaves as the real one would
// on the same traffic; the text of an answer is made up, always the same for the same prompt and seed, of words whose
// tokens are known, so that a conversation's next prompt really begins with the tokens of this one's answer.
//
// A Server also breaks on demand, because that is what a gateway must be tested against: it can be killed so that
// its connections are reset, and told to fail in the ways of Fault.
package simhttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"prefixgate/internal/sim"

	"github.com/daulet/tokenizers"
)

// Version is the version of vLLM whose behavior is followed.
const Version = "0.32.0"

// maxBodyBytes bounds a request's body.
const maxBodyBytes = 256 << 20

// Options describe a Server. Tokenizer is required, the rest has defaults.
type Options struct {
	// Listen is the address to listen on. Default 127.0.0.1:0, a free port.
	Listen string
	// Model is the name the model is served under. Default "prefixgate-demo".
	Model string
	// Aliases are further names for it. Default none.
	Aliases []string
	// Root is the model's path as /v1/models tells it. Default Model.
	Root string
	// Adapters are LoRA adapters to serve, name to path. Default none.
	Adapters map[string]string
	// Tokenizer turns requests into tokens. Required; it stays the caller's to close, after the Server.
	Tokenizer Tokenizer
	// TokenizerFile is the tokenizer.json for turning tokens back into text (/detokenize, echo of token ids). Default: none, these answer 501.
	TokenizerFile string
	// MaxModelLen bounds prompt and answer together, in tokens. Default 131072, or what the KV cache holds if that is less.
	MaxModelLen int
	// Multimodal accepts images in messages. Default false.
	Multimodal bool
	// Engine is the simulated engine.
	Engine sim.Options
	// AnswerTokens is the mean length of answers that end by themselves, in tokens. Default 64.
	AnswerTokens int
	// Seed varies the answers. Default 0.
	Seed uint64
	// Logger gets a line for start and stop. Default: nowhere.
	Logger *slog.Logger
}

// Validate returns everything that is wrong with the options, joined.
func (o Options) Validate() error {
	var errs []error
	if o.Tokenizer == nil {
		errs = append(errs, errors.New("tokenizer: none given"))
	}
	if o.MaxModelLen < 0 {
		errs = append(errs, fmt.Errorf("max_model_len: got %d, want at least 1 (0 means 131072)", o.MaxModelLen))
	}
	if o.AnswerTokens < 0 {
		errs = append(errs, fmt.Errorf("answer_tokens: got %d, want at least 1 (0 means 64)", o.AnswerTokens))
	}
	if err := o.Engine.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("engine: %w", err))
	}
	return errors.Join(errs...)
}

// FaultKind is a way to fail.
type FaultKind uint8

// The kinds of Fault.
const (
	// FaultNone: all is well.
	FaultNone FaultKind = iota
	// FaultReset resets the connection of every inference request before the first byte of an answer.
	FaultReset
	// FaultUnavailable answers every inference request with 503.
	FaultUnavailable
	// FaultHang takes requests and never answers, not even to health checks.
	FaultHang
	// FaultCut resets the connection of streamed answers after AfterTokens tokens.
	FaultCut
	// FaultUnhealthy answers health checks with 503; everything else works.
	FaultUnhealthy
)

// Fault makes a Server fail.
type Fault struct {
	Kind FaultKind
	// AfterTokens is for FaultCut.
	AfterTokens int
}

// Stats are counts of a Server.
type Stats struct {
	// Engine are the simulated engine's.
	Engine sim.Stats
	// Requests counts inference requests by HTTP, whatever became of them; InFlight those that have not ended.
	Requests, InFlight int64
	// Disconnects counts clients that left before the end of their answer.
	Disconnects int64
}

// Server is a simulated engine that listens. Its methods are safe for concurrent use.
type Server struct {
	opts     Options
	lexicon  *lexicon
	live     *live
	metrics  *metrics
	listener net.Listener
	http     *http.Server
	started  time.Time
	served   chan struct{} // closed when the HTTP server has returned
	driven   chan struct{} // closed when live.run has returned
	cancel   context.CancelFunc
	stopOnce sync.Once

	fault       atomic.Pointer[Fault]
	requests    atomic.Int64
	inFlight    atomic.Int64
	disconnects atomic.Int64
	sequence    atomic.Uint64
	handlers    sync.WaitGroup

	decoder struct {
		once sync.Once
		impl *tokenizers.Tokenizer
		err  error
	}

	// mu guards what follows.
	mu      sync.Mutex
	stopped bool
	conns   map[net.Conn]struct{}
	// adapters counts the requests in flight for each adapter.
	adapters map[string]int
}

// New starts a server; it listens when New returns. ctx bounds the start only.
func New(ctx context.Context, opts Options) (*Server, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	opts.Listen = cmp.Or(opts.Listen, "127.0.0.1:0")
	opts.Model = cmp.Or(opts.Model, "prefixgate-demo")
	opts.Root = cmp.Or(opts.Root, opts.Model)
	opts.AnswerTokens = cmp.Or(opts.AnswerTokens, 64)
	opts.Engine = opts.Engine.WithDefaults()
	room := (opts.Engine.NumBlocks - 1) * opts.Engine.BlockTokens
	if opts.MaxModelLen == 0 {
		opts.MaxModelLen = min(131072, room)
	} else if opts.MaxModelLen > room {
		return nil, fmt.Errorf("max_model_len: %d tokens do not fit into a KV cache of %d: lower it, or raise num_blocks", opts.MaxModelLen, room)
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	lex, err := newLexicon(ctx, opts.Tokenizer)
	if err != nil {
		return nil, fmt.Errorf("prepare answers: %w", err)
	}
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", opts.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	s := &Server{
		opts:     opts,
		lexicon:  lex,
		live:     newLive(opts.Engine),
		listener: listener,
		started:  time.Now(),
		served:   make(chan struct{}),
		driven:   make(chan struct{}),
		conns:    make(map[net.Conn]struct{}),
		adapters: make(map[string]int),
	}
	s.metrics = newMetrics(s)
	s.fault.Store(&Fault{})
	run, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	s.http = &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: 30 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return run },
		ConnState:         s.track,
		ErrorLog:          slog.NewLogLogger(opts.Logger.Handler(), slog.LevelDebug),
	}
	go func() {
		defer close(s.driven)
		s.live.run(run)
	}()
	go func() {
		defer close(s.served)
		if err := s.http.Serve(listener); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			opts.Logger.Error("serving ended", "err", err)
		}
	}()
	opts.Logger.Info("simulated replica listens", "addr", s.Addr(), "model", opts.Model, "block_tokens", opts.Engine.BlockTokens, "num_blocks", opts.Engine.NumBlocks)
	return s, nil
}

// Addr returns host and port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// URL returns the base URL, without a slash at its end.
func (s *Server) URL() string { return "http://" + s.Addr() }

// SetFault makes the server fail from now on, or, with the zero Fault, no more.
func (s *Server) SetFault(f Fault) { s.fault.Store(&f) }

// Stats returns the present counts.
func (s *Server) Stats() Stats {
	return Stats{
		Engine: s.live.stats(), Requests: s.requests.Load(), InFlight: s.inFlight.Load(), Disconnects: s.disconnects.Load(),
	}
}

// Shutdown stops accepting, lets running requests end until ctx is done, and frees everything.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	s.stop()
	return err
}

// Close ends everything at once; clients see their connections closed. A second call does nothing.
func (s *Server) Close() error {
	s.stop()
	return nil
}

// Kill ends everything as the death of the machine would: open connections are reset.
func (s *Server) Kill() {
	s.listener.Close()
	s.mu.Lock()
	for c := range s.conns {
		abortive(c)
		c.Close()
	}
	s.mu.Unlock()
	s.stop()
}

// stop waits for every goroutine of the server.
func (s *Server) stop() {
	s.stopOnce.Do(func() {
		s.cancel()
		s.http.Close()
		<-s.served
		<-s.driven
		s.mu.Lock()
		s.stopped = true
		s.mu.Unlock()
		s.handlers.Wait()
		s.decoder.once.Do(func() { s.decoder.err = errors.New("the server is closed") })
		if s.decoder.impl != nil {
			s.decoder.impl.Close()
		}
		s.opts.Logger.Info("simulated replica ended", "addr", s.Addr())
	})
}

// track keeps the open connections, for Kill.
func (s *Server) track(c net.Conn, state http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch state {
	case http.StateNew:
		s.conns[c] = struct{}{}
	case http.StateClosed, http.StateHijacked:
		delete(s.conns, c)
	case http.StateActive, http.StateIdle:
	}
}

// abortive makes the close of a connection a reset.
func abortive(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		tcp.SetLinger(0) //nolint:errcheck // a connection that is gone already needs no reset
	}
}

// reset breaks the connection of a request after what was written so far.
func reset(w http.ResponseWriter) {
	rc := http.NewResponseController(w)
	if w.Header().Get("Content-Type") != "" {
		rc.Flush()
	}
	c, _, err := rc.Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	abortive(c)
	c.Close()
}

// readBody reads a request's body, bounded.
func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBodyBytes))
	if err != nil {
		return nil, fmt.Errorf("read body: %w", err)
	}
	return body, nil
}

// detokenizer returns what turns ids back into text. Most servers never need it, so it is loaded when first asked for.
func (s *Server) detokenizer() (*tokenizers.Tokenizer, error) {
	d := &s.decoder
	d.once.Do(func() {
		if s.opts.TokenizerFile == "" {
			d.err = &apiError{status: http.StatusNotImplemented, typ: "NotImplementedError", message: "this simulated replica has no tokenizer file to turn tokens into text"}
			return
		}
		d.impl, d.err = tokenizers.FromFile(s.opts.TokenizerFile)
	})
	return d.impl, d.err
}
