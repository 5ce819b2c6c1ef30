package tokenize

import (
	"context"
	"runtime"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// engine is what the pool's threads run: one encoder. Implemented by *encoder; tests put slow and failing ones in its place.
type engine interface {
	// encodeSpans encodes each span of text by itself and appends all ids to dst; counts[i] becomes the number of ids of
	// spans[i]. It is called from several threads at once and cannot be interrupted.
	encodeSpans(dst []uint32, text string, spans []span, addSpecial bool, counts []uintptr) ([]uint32, error)
}

var _ engine = (*encoder)(nil)

// pool runs encodings on a fixed set of operating-system threads. The encoders keep caches for each thread that ever ran
// them, so a fixed set bounds their memory, and it bounds the processors that encoding takes from everything else.
//
// There is no queue: a caller hands its work to an idle thread or waits, in order of arrival, until its context ends. What
// nobody waits for any more has therefore either never started or is running on one of the threads. Work comes in pieces of
// at most batchBytes where the text can be cut, so that a small prompt waits for a piece of a large one, not for all of it;
// and where it cannot, such pieces never take all the threads.
type pool struct {
	engine engine
	jobs   chan *job
	// long has a place for each long piece that may be encoded at a time: one less than there are threads.
	long chan struct{}
	busy prometheus.Gauge
	wg   sync.WaitGroup
}

// longBytes is the length from which a piece counts as long. Such a piece has no place to cut it, which only odd texts have,
// and takes its thread for longer than others may wait.
const longBytes = 4 * batchBytes

// job is one piece of work. Its result belongs to the caller once done is closed; a caller that went away leaves it to the
// garbage collector, and store still sees the ids.
type job struct {
	text  string
	spans []span
	// addSpecial asks for what the tokenizer puts around a text.
	addSpecial bool
	// store gets the ids, on the thread that encoded.
	store func(ids []uint32, counts []uintptr) error

	// isLong says that the job holds a place in pool.long, which the thread gives back.
	isLong bool

	done chan struct{}
	err  error
}

// newPool starts the threads; close ends them. Each first encodes the texts of warm: an encoder fills a thread's caches with
// the vocabulary on its first text, which takes longer than a request may wait.
func newPool(e engine, threads int, busy prometheus.Gauge, warm ...string) *pool {
	p := &pool{engine: e, jobs: make(chan *job), long: make(chan struct{}, max(1, threads-1)), busy: busy}
	var warming sync.WaitGroup
	for range threads {
		warming.Add(1)
		p.wg.Go(func() {
			runtime.LockOSThread() // and never unlocked: the thread, and its caches, end with the goroutine
			var counts [1]uintptr
			for _, text := range warm {
				// A failure here shows again in whatever is encoded next.
				_, _ = e.encodeSpans(nil, text, []span{{0, uintptr(len(text))}}, false, counts[:])
			}
			warming.Done()
			p.work()
		})
	}
	warming.Wait()
	return p
}

// work is the life of one thread.
func (p *pool) work() {
	var ids []uint32
	var counts []uintptr
	for j := range p.jobs {
		p.busy.Inc()
		if cap(counts) < len(j.spans) {
			counts = make([]uintptr, len(j.spans))
		}
		counts = counts[:len(j.spans)]
		ids, j.err = p.engine.encodeSpans(ids[:0], j.text, j.spans, j.addSpecial, counts)
		if j.err == nil {
			j.err = j.store(ids, counts)
		}
		p.busy.Dec()
		if j.isLong {
			<-p.long
		}
		close(j.done)
		if cap(ids) > maxKeptIDs {
			ids = nil
		}
	}
}

// maxKeptIDs bounds the buffer that a thread keeps between jobs, in ids.
const maxKeptIDs = 256 << 10

// run encodes spans of text on one of the threads and hands the ids to store, on that thread, whether or not the caller
// still waits; store must not keep them. It returns ctx's error if ctx ends first.
func (p *pool) run(ctx context.Context, text string, spans []span, addSpecial bool, store func(ids []uint32, counts []uintptr) error) error {
	j := &job{text: text, spans: spans, addSpecial: addSpecial, store: store, done: make(chan struct{})}
	if slices.ContainsFunc(spans, func(s span) bool { return s.end-s.start >= longBytes }) {
		select {
		case p.long <- struct{}{}:
			j.isLong = true
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	select {
	case p.jobs <- j:
	case <-ctx.Done():
		if j.isLong {
			<-p.long
		}
		return ctx.Err()
	}
	select {
	case <-j.done:
		return j.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// close ends the threads after their current job. No run may be called during or after it.
func (p *pool) close() {
	close(p.jobs)
	p.wg.Wait()
}
