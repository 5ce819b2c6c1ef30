package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http/httptrace"
	"strconv"
	"sync/atomic"
	"time"
)

// Result says how an attempt, or a whole request, ended. The set is closed: it is a metric's label.
type Result string

// The results.
const (
	// ResultOK: the answer was passed on to its end. It says nothing of the status.
	ResultOK Result = "ok"
	// ResultNoReplica: there was no replica to try.
	ResultNoReplica Result = "no_replica"
	// ResultDial: no connection could be made; the request has not been sent.
	ResultDial Result = "dial_failed"
	// ResultFailed: the connection broke, or spoke no HTTP, before the first byte of the answer.
	ResultFailed Result = "failed"
	// ResultRefused: the replica answered with a status after which another one is asked.
	ResultRefused Result = "refused"
	// ResultFirstByteTimeout: no byte of an answer within FirstByteTimeout.
	ResultFirstByteTimeout Result = "first_byte_timeout"
	// ResultIdleTimeout: the answer paused for longer than IdleTimeout.
	ResultIdleTimeout Result = "idle_timeout"
	// ResultTotalTimeout: the request took longer than TotalTimeout.
	ResultTotalTimeout Result = "total_timeout"
	// ResultBroken: the replica broke off after the first byte of its answer.
	ResultBroken Result = "broken"
	// ResultBadBody: the client's streamed body could not be read to its end. No replica is to blame.
	ResultBadBody Result = "bad_body"
	// ResultClientGone: the client left. No replica is to blame.
	ResultClientGone Result = "client_gone"
	// ResultClientStalled: the client did not accept a piece of the answer within WriteTimeout.
	ResultClientStalled Result = "client_stalled"
)

// Results returns all results, for metrics that want every label value from the start.
func Results() []Result {
	return []Result{
		ResultOK, ResultNoReplica, ResultDial, ResultFailed, ResultRefused, ResultFirstByteTimeout, ResultIdleTimeout,
		ResultTotalTimeout, ResultBroken, ResultBadBody, ResultClientGone, ResultClientStalled,
	}
}

// Outcome says how a request ended.
type Outcome struct {
	// Result is how it ended.
	Result Result
	// Addr is the base URL of the replica that answered, or of the last that was tried; empty if none was.
	Addr string
	// Attempts is the number of replicas tried.
	Attempts int
	// Status is the status sent to the client; 0 if nothing was sent.
	Status int
	// Written says that an answer was begun. If not, the caller owes the client one.
	Written bool
	// Abort says that the answer broke off: the caller must panic with http.ErrAbortHandler after its accounting.
	Abort bool
	// BodyBytes is the number of bytes of the body taken from the replica.
	BodyBytes int64
	// Err is the cause, for the log; nil for ResultOK. It may name addresses, but no part of a body, query or header.
	Err error
}

// outcome puts together how the request ended.
func (f *forward) outcome(w *clientWriter) Outcome {
	o := Outcome{Result: ResultOK, Addr: f.addr, Attempts: f.attempts, Status: w.status, Written: w.status != 0}
	switch {
	case f.failure != nil:
		o.Result, o.Err = f.failure.result, f.failure.err
	case f.answer != nil:
		o.BodyBytes = f.answer.bytes
		o.Result, o.Err = f.answer.result, f.answer.err
		if w.stalled() {
			o.Result, o.Err = ResultClientStalled, w.err
		} else if w.err != nil || (f.aborted && f.client.Err() != nil) {
			o.Result, o.Err = ResultClientGone, w.err
		}
	}
	if f.aborted && o.Result == ResultOK {
		// The writer refused, or the replica promised more bytes than it sent.
		o.Result = ResultBroken
	}
	o.Abort = o.Written && o.Result != ResultOK
	return o
}

// failError is an attempt that ended before its answer began.
type failError struct {
	result Result
	err    error
	// stale: the connection had served before and died before a byte of this answer came, as it does when the replica
	// closes an idle connection in the moment it is used again.
	stale bool
}

// Error returns the cause's text.
func (e *failError) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *failError) Unwrap() error { return e.err }

// classify says what an error before the first byte means. ctx is the attempt's context, client the client's own, body its body if
// that is streamed.
func classify(ctx, client context.Context, body *onceBody, err error, trace *connTrace) *failError {
	switch cause := context.Cause(ctx); {
	case body.broken():
		// First: the server takes a client for gone whose body it could not read, but this one may be waiting for an answer.
		return &failError{result: ResultBadBody, err: errBadBody}
	case client.Err() != nil:
		return &failError{result: ResultClientGone, err: client.Err()}
	case errors.Is(cause, errTotalTimeout):
		return &failError{result: ResultTotalTimeout, err: cause}
	case errors.Is(cause, errFirstByteTimeout):
		return &failError{result: ResultFirstByteTimeout, err: cause}
	}
	var op *net.OpError
	if !trace.connected.Load() || (errors.As(err, &op) && op.Op == "dial") {
		return &failError{result: ResultDial, err: plain(err)}
	}
	return &failError{result: ResultFailed, err: plain(err), stale: trace.stale()}
}

// plain returns an error fit for a log. The HTTP client quotes what it could not read, and a replica's bytes may hold a
// prompt.
func plain(err error) error {
	var op *net.OpError
	var cert *tls.CertificateVerificationError
	switch {
	case errors.As(err, &op):
		return op
	case errors.As(err, &cert):
		return cert
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errClosed
	}
	return errProtocol
}

// What stands for what the HTTP client says of a broken connection.
var (
	errClosed   = errors.New("the replica closed the connection")
	errProtocol = errors.New("the replica's connection broke, or it does not speak HTTP")
	errBadBody  = errors.New("the client's body could not be read to its end")
)

// connTrace notes how far an attempt got on its connection. The transport writes it from its own goroutines.
type connTrace struct {
	begun                       time.Time
	connected, reused, answered atomic.Bool
}

// staleWithin is how soon a stale connection shows: the replica's operating system refuses the first bytes. What dies later
// died at work.
const staleWithin = 2 * time.Second

// stale says that an attempt that failed now had a connection that was dead before.
func (t *connTrace) stale() bool {
	return t.reused.Load() && !t.answered.Load() && time.Since(t.begun) < staleWithin
}

func (t *connTrace) attach(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) {
			t.connected.Store(true)
			t.reused.Store(info.Reused)
		},
		GotFirstResponseByte: func() { t.answered.Store(true) },
	})
}

// readResult says what an error while reading the answer's body means.
func readResult(ctx, client context.Context, body *onceBody, err error) (Result, error) {
	switch cause := context.Cause(ctx); {
	case errors.Is(err, io.EOF):
		return ResultOK, nil
	case client.Err() != nil:
		return ResultClientGone, client.Err()
	case errors.Is(cause, errTotalTimeout):
		return ResultTotalTimeout, cause
	case errors.Is(cause, errIdleTimeout):
		return ResultIdleTimeout, cause
	case body.broken():
		return ResultBadBody, errBadBody
	}
	return ResultBroken, plain(err)
}

func itoa(n int) string { return strconv.Itoa(n) }
