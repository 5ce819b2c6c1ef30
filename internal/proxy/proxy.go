// Package proxy forwards a request to replicas and streams the answer back.
//
// In go the client's request, its body (as bytes that can be sent again, or as a stream that cannot) and a function that
// names the next replica to try. Out goes the answer, byte for byte and as it comes, and an Outcome that says how it
// ended. The package never looks into a body, never changes one, and knows nothing of prompts, prefixes or load.
//
// Headers, trailers, upgrades and flushing are httputil.ReverseProxy's; what is added sits below it, in the RoundTripper,
// as attempts. An attempt fails over to the next replica only while nothing has reached the client: replicas send the
// header of a stream as soon as they accept a request, long before the first token, so an answer counts as begun with the
// first byte of its body, and its header is held back until then. From that byte on nothing is retried; a replica that dies
// breaks the client's connection visibly instead of ending the answer as if it were complete.
//
// A Proxy is safe for concurrent use.
package proxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
)

// headerPrefix is the prefix of the gateway's own headers. A client's and a replica's are dropped: nobody but the gateway
// speaks in them.
const headerPrefix = "X-Prefixgate-"

// attemptHeader tells a replica that it is not the first to be asked.
const attemptHeader = headerPrefix + "Attempt"

// maxStale is how many stale connections in a row are passed over before the replica is blamed. The pool may hold several
// that the replica closed at the same time.
const maxStale = 3

// errTotalTimeout, errFirstByteTimeout and errIdleTimeout are the causes with which an attempt's context is canceled.
var (
	errTotalTimeout     = errors.New("the request took longer than total_timeout")
	errFirstByteTimeout = errors.New("no byte of the answer within first_byte_timeout")
	errIdleTimeout      = errors.New("no byte of the answer for idle_timeout")
)

// Attempt is one try on one replica.
type Attempt struct {
	// Addr is the replica's base URL, as in replica.ID.
	Addr string
	// Done is called exactly once, when the attempt is over: at its failure, or at the end of its answer. It may be nil.
	Done func(Result)
}

// Next names the replica for attempt n, counted from 0, and whether there is one. It must not block.
type Next func(n int) (Attempt, bool)

// Observer watches an answer on its way. Its methods are called from one goroutine, in order, and must not block: the
// client waits for them.
type Observer interface {
	// Header is called once, before anything is sent to the client. It may change header, but not what describes the body.
	Header(status int, header http.Header)
	// Chunk is called for each piece of the body as it comes from the replica. It must not keep or change p.
	Chunk(p []byte)
}

// Proxy forwards requests. Make one with New.
type Proxy struct {
	opts      Options
	transport *http.Transport
	buffers   *bufferPool
	retry     map[int]bool
}

// New returns a Proxy with its own connections to replicas. opts must have passed Validate.
func New(opts Options) *Proxy {
	opts = opts.withDefaults()
	p := &Proxy{
		opts:      opts,
		transport: newTransport(opts),
		buffers:   newBufferPool(),
		retry:     make(map[int]bool, len(opts.RetryStatuses)),
	}
	for _, status := range opts.RetryStatuses {
		p.retry[status] = true
	}
	return p
}

// Close closes the idle connections to replicas. Requests under way are not touched.
func (p *Proxy) Close() {
	p.transport.CloseIdleConnections()
}

// Call is how a request shall be forwarded.
type Call struct {
	// Body is the request's body, to be sent as often as needed. If it is nil, the client's body is streamed to a replica as
	// it comes and can be sent only once.
	Body []byte
	// Next names the replicas to try.
	Next Next
	// Header is set on the request for the replica after hop-by-hop headers are gone: a client that names one of these in
	// its Connection header does not take it away. It may be nil.
	Header http.Header
	// Observer watches the answer; it may be nil.
	Observer Observer
}

// Forward sends r to the replicas that call names, one after the other until one answers, and streams the answer to w.
//
// If the Outcome says that nothing was written, the caller owes the client an answer. If it says Abort, the answer broke
// off after its first byte and the caller must panic with http.ErrAbortHandler once it has accounted for the request, so
// that the client sees a broken stream. Forward itself does not panic for that.
func (p *Proxy) Forward(w http.ResponseWriter, r *http.Request, call Call) Outcome {
	ctx := r.Context()
	if p.opts.TotalTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, p.opts.TotalTimeout, errTotalTimeout)
		defer cancel()
	}
	f := &forward{proxy: p, client: r.Context(), call: call}
	cw := newClientWriter(w, p.opts.WriteTimeout)
	f.serve(cw, r.WithContext(ctx))
	return f.outcome(cw)
}

// forward is the state of one request. It is used by the request's own goroutine only.
type forward struct {
	proxy  *Proxy
	client context.Context // the client's: done when it left
	call   Call

	attempts int        // attempts begun
	addr     string     // of the last one
	answer   *answer    // the answer being passed on; nil before the first
	failure  *failError // what ended the last attempt, if none answered
	aborted  bool       // ReverseProxy gave up after the header went out
	stream   *onceBody  // the client's body, if it is streamed
}

// serve runs the reverse proxy and turns its panic for a broken stream into f.aborted.
func (f *forward) serve(w http.ResponseWriter, r *http.Request) {
	defer func() {
		if f.answer != nil {
			f.answer.finish()
		}
		if v := recover(); v != nil {
			if err, ok := v.(error); !ok || !errors.Is(err, http.ErrAbortHandler) {
				panic(v)
			}
			f.aborted = true
		}
	}()
	rp := httputil.ReverseProxy{
		Rewrite:        f.rewrite,
		Transport:      roundTripper(f.roundTrip),
		FlushInterval:  -1, // every piece at once
		BufferPool:     f.proxy.buffers,
		ModifyResponse: f.modifyResponse,
		ErrorHandler:   f.handleError,
		// What it would log is in the Outcome, and may not name a URL with a query in it.
		ErrorLog: log.New(io.Discard, "", 0),
	}
	rp.ServeHTTP(w, r)
}

// rewrite makes the headers of the request for a replica; where it goes is decided for each attempt.
func (f *forward) rewrite(pr *httputil.ProxyRequest) {
	h := pr.Out.Header
	dropOwn(h)
	h.Del("Te") // ReverseProxy lets "trailers" pass; it is hop by hop all the same, and this hop takes trailers anyway
	if f.proxy.opts.TrustForwarded {
		// ReverseProxy takes these away before Rewrite; the chain goes on where the one before us is trusted.
		h["X-Forwarded-For"] = pr.In.Header["X-Forwarded-For"]
	}
	pr.SetXForwarded()
	if f.proxy.opts.TrustForwarded {
		for _, name := range [...]string{"X-Forwarded-Host", "X-Forwarded-Proto"} {
			if v := pr.In.Header.Get(name); v != "" {
				h.Set(name, v)
			}
		}
	}
	maps.Copy(h, f.call.Header)
	if f.call.Body != nil {
		// The body is here already; a replica must not be made to ask for it.
		h.Del("Expect")
		pr.Out.Body = nil
	}
	// ReverseProxy drops what it cannot parse of a query; here nobody reads it, and the replica shall get it as it is.
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery
	// An absolute-form or forged Host never decides where a request goes.
	pr.Out.Host = ""
	pr.Out.URL.Scheme = "http"
	pr.Out.URL.Host = "replica.invalid"
}

// modifyResponse lets the observer see the header, after the replica's own gateway headers are gone.
func (f *forward) modifyResponse(resp *http.Response) error {
	dropOwn(resp.Header)
	if f.call.Observer != nil {
		f.call.Observer.Header(resp.StatusCode, resp.Header)
	}
	return nil
}

// handleError is called if no attempt gave an answer. The caller of Forward answers the client.
func (f *forward) handleError(_ http.ResponseWriter, _ *http.Request, err error) {
	var fail *failError
	if !errors.As(err, &fail) {
		fail = &failError{result: ResultFailed, err: err}
	}
	f.failure = fail
}

// roundTrip tries one replica after the other. It returns the first answer that has begun.
func (f *forward) roundTrip(req *http.Request) (*http.Response, error) {
	attempt, ok := f.call.Next(0)
	if !ok {
		return nil, &failError{result: ResultNoReplica, err: errors.New("no replica to try")}
	}
	sameAgain := 0 // how often a stale connection was hit and the same replica asked once more
	for {
		resp, fail := f.try(req, attempt, sameAgain > 0)
		if fail == nil && !f.proxy.retry[resp.StatusCode] {
			return resp, nil
		}
		if fail != nil && !f.mayRetry(req, fail) {
			finish(attempt, fail.result)
			return nil, fail
		}
		if fail != nil && fail.stale && sameAgain < maxStale {
			sameAgain++
			continue
		}
		sameAgain = 0
		if f.attempts >= f.proxy.opts.MaxAttempts || (fail == nil && !f.canResend(req)) {
			return f.give(attempt, resp, fail)
		}
		following, ok := f.call.Next(f.attempts)
		if !ok {
			return f.give(attempt, resp, fail)
		}
		if resp != nil {
			f.answer.result = ResultRefused
			resp.Body.Close()
			f.answer = nil
		} else {
			finish(attempt, fail.result)
		}
		attempt = following
	}
}

// give ends the attempts: with the last replica's answer, whatever it says, or with its failure.
func (f *forward) give(attempt Attempt, resp *http.Response, fail *failError) (*http.Response, error) {
	if fail == nil {
		return resp, nil
	}
	finish(attempt, fail.result)
	return nil, fail
}

// mayRetry says whether another replica may be asked after fail.
func (f *forward) mayRetry(req *http.Request, fail *failError) bool {
	if req.Context().Err() != nil { // the client left, or the whole request's time is up
		return false
	}
	switch fail.result {
	case ResultDial:
		return f.canResend(req)
	case ResultFailed:
		return f.canResend(req)
	case ResultFirstByteTimeout:
		// The generation may go on over there: starting it again elsewhere doubles the load when there is too much already.
		return f.proxy.opts.RetryFirstByteTimeout && f.canResend(req)
	case ResultOK, ResultNoReplica, ResultClientGone, ResultTotalTimeout, ResultBroken, ResultRefused, ResultBadBody, ResultClientStalled,
		ResultIdleTimeout:
	}
	return false
}

// canResend says whether the request's body can be sent once more: it is held in memory, there is none, or nothing of it
// was read.
func (f *forward) canResend(req *http.Request) bool {
	if f.call.Body != nil || req.Body == nil || req.Body == http.NoBody {
		return true
	}
	return f.stream != nil && !f.stream.touched.Load()
}

// try sends the request to one replica and waits for its answer to begin.
func (f *forward) try(req *http.Request, attempt Attempt, sameAgain bool) (*http.Response, *failError) {
	if !sameAgain {
		f.attempts++
	}
	f.addr = attempt.Addr
	target, err := url.Parse(attempt.Addr)
	if err != nil || target.Host == "" {
		return nil, &failError{result: ResultDial, err: errors.New("replica address is not a URL")}
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	watch := newWatch(cancel, f.proxy.opts.FirstByteTimeout, errFirstByteTimeout)
	trace := &connTrace{begun: time.Now()}
	out := req.WithContext(trace.attach(ctx))
	out.URL = cloneURL(req.URL, target)
	if f.attempts > 1 {
		out.Header = req.Header.Clone()
		out.Header.Set(attemptHeader, itoa(f.attempts))
	}
	if f.call.Body != nil {
		out.Body = http.NoBody
		if len(f.call.Body) > 0 {
			out.Body = io.NopCloser(bytes.NewReader(f.call.Body))
		}
		out.ContentLength = int64(len(f.call.Body))
		out.TransferEncoding = nil // a chunked body is whole by now
		// No GetBody: the transport would use it to send a request again that this package did not decide to send again.
		out.GetBody = nil
	} else if req.Body != nil && req.Body != http.NoBody {
		if f.stream == nil {
			f.stream = &onceBody{ReadCloser: req.Body}
		}
		out.Body = f.stream
	}

	resp, err := f.proxy.transport.RoundTrip(out)
	var first []byte
	var firstErr error
	if err == nil && f.holdsHeader(resp) {
		first, firstErr = f.proxy.buffers.readFirst(resp.Body)
		if firstErr != nil && !errors.Is(firstErr, io.EOF) && len(first) == 0 {
			err = firstErr
			resp.Body.Close()
		}
	}
	watch.stop()
	if err != nil {
		f.proxy.buffers.Put(first)
		fail := classify(ctx, f.client, f.stream, err, trace)
		cancel(nil)
		return nil, fail
	}
	f.answer = newAnswer(resp, answerParts{
		attempt: attempt, cancel: cancel, ctx: ctx, client: f.client, stream: f.stream, observer: f.call.Observer,
		idle: f.proxy.opts.IdleTimeout, first: first, firstErr: firstErr, buffers: f.proxy.buffers,
	})
	if resp.StatusCode != http.StatusSwitchingProtocols {
		resp.Body = f.answer
	}
	return resp, nil
}

// holdsHeader says whether the answer's header waits for the first byte of its body. A request that cannot be sent again
// gains nothing from waiting, and a stream that the client writes into may have to answer before it is fed.
func (f *forward) holdsHeader(resp *http.Response) bool {
	return f.call.Body != nil && resp.StatusCode != http.StatusSwitchingProtocols && resp.Body != nil && resp.Body != http.NoBody
}

// dropOwn removes the gateway's own headers, whoever wrote them.
func dropOwn(h http.Header) {
	for name := range h {
		if strings.HasPrefix(http.CanonicalHeaderKey(name), headerPrefix) {
			delete(h, name)
		}
	}
}

// cloneURL returns the request's path and query at the replica. A path in the replica's base URL goes before it.
func cloneURL(u, target *url.URL) *url.URL {
	out := *u
	out.Scheme, out.Host, out.User = target.Scheme, target.Host, nil
	if base := strings.TrimSuffix(target.EscapedPath(), "/"); base != "" {
		raw := base + u.EscapedPath()
		if path, err := url.PathUnescape(raw); err == nil {
			out.Path, out.RawPath = path, raw
		}
	}
	return &out
}

// finish reports the end of an attempt that gave no answer.
func finish(a Attempt, r Result) {
	if a.Done != nil {
		a.Done(r)
	}
}

// roundTripper makes a function an http.RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip calls the function.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// onceBody is a body that can be read once; it remembers whether that has begun, and whether it failed. The transport reads it
// from a goroutine of its own.
type onceBody struct {
	io.ReadCloser
	touched, failed atomic.Bool
}

// Read notes that the body was begun, and an error other than its end.
func (b *onceBody) Read(p []byte) (int, error) {
	b.touched.Store(true)
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.failed.Store(true)
	}
	return n, err
}

// broken says whether reading it failed; there may be no streamed body at all.
func (b *onceBody) broken() bool { return b != nil && b.failed.Load() }

// Close is left to the server, which owns the client's body: the transport closes bodies on a failed dial, and the next
// attempt still needs this one.
func (b *onceBody) Close() error { return nil }

// watch cancels an attempt unless it is stopped in time.
type watch struct{ timer *time.Timer }

func newWatch(cancel context.CancelCauseFunc, after time.Duration, cause error) watch {
	if after <= 0 {
		return watch{}
	}
	return watch{timer: time.AfterFunc(after, func() { cancel(cause) })}
}

func (w watch) stop() {
	if w.timer != nil {
		w.timer.Stop()
	}
}
