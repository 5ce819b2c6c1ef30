package simhttp

import (
	"context"
	"sync"
	"time"

	"prefixgate/internal/sim"
)

// live drives a sim.Engine with the real clock: one goroutine sleeps until the engine's next event and hands out what happened.
type live struct {
	start time.Time
	// wake tells the goroutine that the next event may have moved. It holds one token.
	wake chan struct{}

	// mu guards what follows.
	mu     sync.Mutex
	engine *sim.Engine
	jobs   map[uint64]*job
	lastID uint64
	batch  []sim.Event
}

// job collects the events of one HTTP request's sequences.
type job struct {
	// ready holds a token while events wait.
	ready chan struct{}

	// mu guards events.
	mu     sync.Mutex
	events []sim.Event
}

func newLive(opts sim.Options) *live {
	return &live{start: time.Now(), wake: make(chan struct{}, 1), engine: sim.NewEngine(opts), jobs: make(map[uint64]*job)}
}

func newJob() *job { return &job{ready: make(chan struct{}, 1)} }

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// run returns when ctx is done.
func (l *live) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-l.wake:
		}
		l.mu.Lock()
		l.batch = l.engine.Advance(time.Since(l.start), l.batch[:0])
		for _, ev := range l.batch {
			j := l.jobs[ev.ID]
			if j == nil {
				continue
			}
			j.mu.Lock()
			j.events = append(j.events, ev)
			j.mu.Unlock()
			notify(j.ready)
			if ev.Kind == sim.Done {
				delete(l.jobs, ev.ID)
			}
		}
		at, ok := l.engine.Next()
		l.mu.Unlock()
		if ok {
			timer.Reset(at - time.Since(l.start))
		} else {
			timer.Stop()
		}
	}
}

// submit gives the engine requests on behalf of j, and them consecutive IDs. It returns those that were taken, in order, and the
// engine's time. After an error the caller aborts them.
func (l *live) submit(j *job, requests []sim.Request) (ids []uint64, now time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer notify(l.wake)
	now = time.Since(l.start)
	for _, r := range requests {
		r.ID = l.lastID + 1
		if err := l.engine.Submit(now, r); err != nil {
			return ids, now, err
		}
		l.lastID++
		l.jobs[r.ID] = j
		ids = append(ids, r.ID)
	}
	return ids, now, nil
}

// abort takes requests out, as far as they are not done.
func (l *live) abort(ids []uint64) (aborted int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if _, ok := l.jobs[id]; !ok {
			continue
		}
		delete(l.jobs, id)
		if l.engine.Abort(time.Since(l.start), id) {
			aborted++
		}
	}
	notify(l.wake)
	return aborted
}

func (l *live) stats() sim.Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.engine.Stats()
}

func (l *live) resetCache() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.engine.ResetCache()
}

// take appends the events that wait to dst. It blocks until there are some or ctx is done.
func (j *job) take(ctx context.Context, dst []sim.Event) ([]sim.Event, error) {
	select {
	case <-ctx.Done():
		return dst, ctx.Err()
	case <-j.ready:
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	dst = append(dst, j.events...)
	j.events = j.events[:0]
	return dst, nil
}
