package proxy

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// bufferBytes is the size of a copy buffer: all that a stream holds in memory, besides the kernel's buffers.
const bufferBytes = 32 << 10

// bufferPool lends copy buffers. It is an httputil.BufferPool.
type bufferPool struct{ pool sync.Pool }

func newBufferPool() *bufferPool {
	return &bufferPool{pool: sync.Pool{New: func() any { return new([bufferBytes]byte) }}}
}

// Get returns a buffer of bufferBytes bytes.
func (b *bufferPool) Get() []byte {
	return b.pool.Get().(*[bufferBytes]byte)[:]
}

// Put takes a buffer back. One of another size is dropped.
func (b *bufferPool) Put(p []byte) {
	if cap(p) >= bufferBytes {
		b.pool.Put((*[bufferBytes]byte)(p[:bufferBytes]))
	}
}

// readFirst reads the first piece of a body into a buffer of the pool. It returns no buffer if there was nothing to read.
func (b *bufferPool) readFirst(body io.Reader) ([]byte, error) {
	p := b.Get()
	for {
		n, err := body.Read(p)
		if n > 0 {
			return p[:n], err
		}
		if err != nil {
			b.Put(p)
			return nil, err
		}
	}
}

// clientWriter is the way to the client. It bounds the time that each piece may take and remembers what went wrong.
type clientWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration
	status  int
	err     error
	bounded bool // the connection takes deadlines
}

func newClientWriter(w http.ResponseWriter, timeout time.Duration) *clientWriter {
	return &clientWriter{ResponseWriter: w, control: http.NewResponseController(w), timeout: timeout, bounded: timeout > 0}
}

// Unwrap lets http.ResponseController reach the connection.
func (w *clientWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader notes the final status.
func (w *clientWriter) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		w.status = status
		if h := w.Header(); h["Content-Type"] == nil {
			h["Content-Type"] = nil // or the server would guess one that the replica did not send
		}
	}
	w.ResponseWriter.WriteHeader(status)
}

// Hijack hands the connection over after an upgrade was agreed.
func (w *clientWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := w.control.Hijack()
	if err == nil {
		w.status = http.StatusSwitchingProtocols
	}
	return conn, rw, err
}

// Write sends a piece within the time allowed.
func (w *clientWriter) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	w.extend()
	n, err := w.ResponseWriter.Write(p)
	if err != nil {
		w.err = err
	}
	return n, err
}

// FlushError pushes what is buffered to the connection, within the time allowed. Every piece is flushed, so the deadline is
// lifted here: on HTTP/2 one that passes between two pieces, while the replica is thinking, would reset the stream.
func (w *clientWriter) FlushError() error {
	w.extend()
	err := w.control.Flush()
	if err != nil && !errors.Is(err, http.ErrNotSupported) {
		w.err = err
	}
	if w.bounded && w.err == nil {
		w.bounded = w.control.SetWriteDeadline(time.Time{}) == nil
	}
	return err
}

// Flush is FlushError for callers that cannot take an error.
func (w *clientWriter) Flush() {
	_ = w.FlushError() // kept in w.err
}

// extend moves the deadline for the piece that is about to be sent.
func (w *clientWriter) extend() {
	if !w.bounded {
		return
	}
	if err := w.control.SetWriteDeadline(time.Now().Add(w.timeout)); err != nil {
		w.bounded = false // an HTTP/2 stream of an older server, or a test's recorder
	}
}

// stalled says that the client did not take a piece in time.
func (w *clientWriter) stalled() bool {
	return errors.Is(w.err, os.ErrDeadlineExceeded)
}
