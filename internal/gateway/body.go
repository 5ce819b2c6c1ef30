package gateway

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"prefixgate/internal/openai"
)

// errSlowBody is a client that sends its body too slowly.
var errSlowBody = &openai.Error{
	Status: http.StatusRequestTimeout, Type: openai.TypeInvalidRequest, Code: "body_timeout",
	Message: "the request body came too slowly: send it again",
}

// pacedBody is a client's body that must come within a time: grace, plus what the least rate allows for the bytes so far.
// It moves the connection's read deadline, and clears it at the body's end, so that nothing of it touches the answer.
type pacedBody struct {
	body    io.ReadCloser
	control *http.ResponseController
	start   time.Time
	grace   time.Duration
	rate    int64 // bytes per second
	read    int64
	set     time.Time
	off     bool // the connection takes no deadlines
}

func newPacedBody(w http.ResponseWriter, r *http.Request, grace time.Duration, rate int64) *pacedBody {
	return &pacedBody{body: r.Body, control: http.NewResponseController(w), start: time.Now(), grace: grace, rate: rate}
}

// Read reads on, within the time that is left.
func (b *pacedBody) Read(p []byte) (int, error) {
	if !b.off {
		deadline := b.start.Add(b.grace + time.Duration(float64(b.read)/float64(b.rate)*float64(time.Second)))
		if deadline.Sub(b.set) > 100*time.Millisecond {
			b.set = deadline
			b.off = b.control.SetReadDeadline(deadline) != nil
		}
	}
	n, err := b.body.Read(p)
	b.read += int64(n)
	if errors.Is(err, io.EOF) && !b.off {
		// A body that is not read to its end keeps its deadline: the server reads what is left of it before it answers.
		b.off = b.control.SetReadDeadline(time.Time{}) != nil
	}
	return n, err
}

// Close ends reading.
func (b *pacedBody) Close() error { return b.body.Close() }

// readBody reads the whole body, at most limit bytes of it. The error is fit for the client.
func readBody(w http.ResponseWriter, r *http.Request, limit int64, grace time.Duration, rate int64) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return []byte{}, nil
	}
	if r.ContentLength > limit {
		refuseRest(w)
		return nil, openai.BodyTooLarge(limit)
	}
	paced := newPacedBody(w, r, grace, rate)
	body := http.MaxBytesReader(w, paced, limit)
	// What a client claims is not allocated before it has sent something like it.
	buf := make([]byte, 0, min(max(r.ContentLength+1, 4<<10), 1<<20))
	for {
		if len(buf) == cap(buf) {
			want := int64(2 * cap(buf))
			if r.ContentLength > 0 {
				want = min(want, r.ContentLength+1)
			}
			grown := make([]byte, len(buf), max(want, int64(cap(buf))+512))
			copy(grown, buf)
			buf = grown
		}
		n, err := body.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if err == nil {
			continue
		}
		if errors.Is(err, io.EOF) {
			return buf, nil
		}
		refuseRest(w)
		return nil, bodyError(err, limit)
	}
}

// errBodyCut is a body that ended before it was whole, mostly because the client left; errBodyFraming one that is not what HTTP
// wants. The server closes the connection after either.
var (
	errBodyCut = &openai.Error{
		Status: http.StatusBadRequest, Type: openai.TypeInvalidRequest, Code: "body_incomplete",
		Message: "the request body ended before it was whole: send it again",
	}
	errBodyFraming = &openai.Error{
		Status: http.StatusBadRequest, Type: openai.TypeInvalidRequest, Code: "body_malformed",
		Message: "the request body's chunked encoding is malformed: send it with a Content-Length or in well-formed chunks",
	}
)

// bodyError returns what a client is told whose body could not be read to its end because of err.
func bodyError(err error, limit int64) *openai.Error {
	var network net.Error
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	switch {
	case tooLarge:
		return openai.BodyTooLarge(limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errSlowBody
	case errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &network):
		return errBodyCut
	}
	return errBodyFraming
}

// refuseRest makes the server close the connection after the answer instead of reading what else the client sends, but not at
// once: a connection that is closed with something unread is reset, and the answer may be lost with it. The server knows how to
// wait for a moment, and does so where it is told that a body's limit was hit. Only a MaxBytesReader can tell it, through its own
// writer, which is below gin's.
func refuseRest(w http.ResponseWriter) {
	for {
		outer, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			break
		}
		w = outer.Unwrap()
	}
	over := http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0)
	_, _ = over.Read(make([]byte, 1)) // always one byte too many
}

// limitedBody is a streamed body; it remembers why it could not be read to its end. The proxy's transport reads it from a
// goroutine of its own.
type limitedBody struct {
	io.ReadCloser
	limit  int64
	failed atomic.Pointer[openai.Error]
}

// Read reads on and notes what goes wrong.
func (b *limitedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.failed.Store(bodyError(err, b.limit))
	}
	return n, err
}
