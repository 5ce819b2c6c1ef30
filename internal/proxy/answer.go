package proxy

import (
	"context"
	"io"
	"net/http"
	"time"
)

// answer is the body of a replica's answer on its way to the client. It hands out what was read ahead first, shows each
// piece to the observer, breaks the attempt off when it pauses for too long, and notes how it ended. Only the request's own
// goroutine uses it, except for the timer, which touches nothing but the cancel function.
type answer struct {
	answerParts
	body   io.ReadCloser
	pause  *time.Timer // breaks off an answer that pauses; nil if it may
	bytes  int64
	result Result // how reading ended; ResultClientGone until it did
	err    error
	rest   []byte // of first, not yet handed out
	done   bool
}

// answerParts is what an answer is made of.
type answerParts struct {
	attempt     Attempt
	cancel      context.CancelCauseFunc
	ctx, client context.Context
	stream      *onceBody // the client's body; nil if it is not streamed
	observer    Observer
	idle        time.Duration
	first       []byte // read ahead, from buffers; nil if nothing was
	firstErr    error  // what came with first
	buffers     *bufferPool
}

func newAnswer(resp *http.Response, parts answerParts) *answer {
	a := &answer{answerParts: parts, body: resp.Body, rest: parts.first, result: ResultBroken}
	if resp.StatusCode == http.StatusSwitchingProtocols || resp.Body == nil || resp.Body == http.NoBody {
		a.result = ResultOK // there is nothing to read to an end
	}
	if parts.idle > 0 && a.result != ResultOK {
		a.pause = time.AfterFunc(parts.idle, func() { parts.cancel(errIdleTimeout) })
		a.pause.Stop() // it runs only while a read waits
	}
	return a
}

// Read hands out the next piece.
func (a *answer) Read(p []byte) (int, error) {
	n, err := a.read(p)
	if n > 0 {
		a.bytes += int64(n)
		if a.observer != nil {
			a.observer.Chunk(p[:n])
		}
	}
	if err != nil {
		a.result, a.err = readResult(a.ctx, a.client, a.stream, err)
	}
	return n, err
}

func (a *answer) read(p []byte) (int, error) {
	if len(a.rest) > 0 {
		n := copy(p, a.rest)
		a.rest = a.rest[n:]
		if len(a.rest) == 0 {
			a.release()
		}
		return n, nil
	}
	if a.firstErr != nil {
		return 0, a.firstErr
	}
	if a.pause != nil {
		a.pause.Reset(a.idle)
	}
	n, err := a.body.Read(p)
	if a.pause != nil {
		a.pause.Stop() // a client that reads slowly is not a replica that pauses
	}
	return n, err
}

// Close ends the attempt. Closing before the end cancels the replica's request.
func (a *answer) Close() error {
	a.finish()
	return nil
}

// finish closes the body and reports the attempt's end, once.
func (a *answer) finish() {
	if a.done {
		return
	}
	a.done = true
	if a.pause != nil {
		a.pause.Stop()
	}
	if a.result == ResultBroken && a.err == nil && a.client.Err() != nil {
		a.result, a.err = ResultClientGone, a.client.Err()
	}
	a.cancel(nil)
	a.body.Close()
	a.release()
	finish(a.attempt, a.result)
}

// release gives the read-ahead buffer back.
func (a *answer) release() {
	if a.first != nil {
		a.buffers.Put(a.first[:cap(a.first)])
		a.first, a.rest = nil, nil
	}
}
