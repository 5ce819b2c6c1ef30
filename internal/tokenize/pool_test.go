package tokenize

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// slowEngine gives one id for each byte, after a wait.
type slowEngine struct {
	wait          time.Duration
	running, most atomic.Int32
	calls         atomic.Int32
}

func (e *slowEngine) encodeSpans(dst []uint32, text string, spans []span, _ bool, counts []uintptr) ([]uint32, error) {
	e.calls.Add(1)
	n := e.running.Add(1)
	for {
		most := e.most.Load()
		if n <= most || e.most.CompareAndSwap(most, n) {
			break
		}
	}
	time.Sleep(e.wait)
	e.running.Add(-1)
	for i, s := range spans {
		for _, b := range []byte(text[s.start:s.end]) {
			dst = append(dst, uint32(b))
		}
		counts[i] = s.end - s.start
	}
	return dst, nil
}

func testGauge() prometheus.Gauge {
	return prometheus.NewGauge(prometheus.GaugeOpts{Name: "g", Help: "A gauge."})
}

// A tokenizer that takes three seconds, fifty requests with a budget each, half of their clients gone before: nobody waits
// beyond the budget, no more runs than there are threads, and nothing is left over.
func TestSlowEncodingsDoNotPileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &slowEngine{wait: 3 * time.Second}
		p := newPool(e, 2, testGauge())
		start := time.Now()
		var wg sync.WaitGroup
		var budget, canceled atomic.Int32
		for i := range 50 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				defer cancel()
				if i%2 == 0 {
					time.AfterFunc(50*time.Millisecond, cancel)
				}
				err := p.run(ctx, "text", []span{{0, 4}}, false, func([]uint32, []uintptr) error { return nil })
				switch {
				case errors.Is(err, context.DeadlineExceeded):
					budget.Add(1)
				case errors.Is(err, context.Canceled):
					canceled.Add(1)
				default:
					t.Errorf("run with a slow encoder = %v", err)
				}
			})
		}
		wg.Wait()
		if waited := time.Since(start); waited > 200*time.Millisecond {
			t.Errorf("requests waited %v, their budget is 200ms", waited)
		}
		if budget.Load() != 25 || canceled.Load() != 25 {
			t.Errorf("%d ran out of budget and %d were canceled, want 25 of each", budget.Load(), canceled.Load())
		}
		if got := e.calls.Load(); got > 2 {
			t.Errorf("%d encodings were started, want no more than the 2 threads", got)
		}
		// Later, the threads are free again.
		time.Sleep(3 * time.Second)
		var ids []uint32
		err := p.run(t.Context(), "ab", []span{{0, 2}}, false, func(got []uint32, _ []uintptr) error {
			ids = slices.Clone(got)
			return nil
		})
		if err != nil || !slices.Equal(ids, []uint32{'a', 'b'}) {
			t.Errorf("run after the slow ones = %v, %v", ids, err)
		}
		p.close()
		if e.most.Load() > 2 {
			t.Errorf("%d encodings ran at a time, want at most 2", e.most.Load())
		}
	})
}

// What was given up on is still put into the cache when it is ready.
func TestAbandonedWorkIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &slowEngine{wait: time.Second}
		p := newPool(e, 1, testGauge())
		c := newChunker(p, new(cutRules), 1<<20, newMetrics(nil, "m"))
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if _, err := c.encode(ctx, nil, "hello", nil, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("encode beyond its budget = %v", err)
		}
		time.Sleep(2 * time.Second)
		ids, err := c.encode(t.Context(), nil, "hello", []uint32{1}, []uint32{2})
		if err != nil || len(ids) != 7 || ids[0] != 1 || ids[6] != 2 {
			t.Errorf("encode again = %v, %v", ids, err)
		}
		if got := e.calls.Load(); got != 1 {
			t.Errorf("the encoder was called %d times, want once", got)
		}
		p.close()
	})
}

// A small prompt waits for one batch of a large one, not for all of it.
func TestSmallPromptsOvertakeLargeOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &slowEngine{wait: 10 * time.Millisecond}
		p := newPool(e, 1, testGauge())
		c := newChunker(p, &cutRules{newline: true}, 0, newMetrics(nil, "m"))
		large := make([]byte, 0, 1<<20)
		for len(large) < 1<<20 {
			large = append(large, "some words\n"...)
		}
		var wg sync.WaitGroup
		start := time.Now()
		var took time.Duration
		wg.Go(func() {
			if _, err := c.encode(t.Context(), nil, string(large), nil, nil); err != nil {
				t.Error(err)
			}
			took = time.Since(start)
		})
		time.Sleep(15 * time.Millisecond)
		for range 5 {
			before := time.Now()
			if _, err := c.encode(t.Context(), nil, "small", nil, nil); err != nil {
				t.Error(err)
			}
			if waited := time.Since(before); waited > 40*time.Millisecond {
				t.Errorf("a small prompt took %v, the batches take 10ms", waited)
			}
		}
		wg.Wait()
		if took < 200*time.Millisecond {
			t.Errorf("the large prompt took %v: it did not go in batches", took)
		}
		p.close()
	})
}

// Texts that cannot be cut take their threads for long: one thread is always left to the others.
func TestLongPiecesLeaveAThread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &slowEngine{wait: time.Second}
		p := newPool(e, 2, testGauge())
		c := newChunker(p, new(cutRules), 0, newMetrics(nil, "m"))
		odd := strings.Repeat("a", longBytes)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				if _, err := c.encode(ctx, nil, odd, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("an odd text = %v, want to run out of time", err)
				}
			})
		}
		synctest.Wait()
		start := time.Now()
		if _, err := c.encode(t.Context(), nil, "short", nil, nil); err != nil || time.Since(start) > time.Second {
			t.Errorf("a short text beside odd ones took %v, %v, want its own second", time.Since(start), err)
		}
		wg.Wait()
		time.Sleep(time.Second)
		if _, err := c.encode(t.Context(), nil, odd, nil, nil); err != nil {
			t.Errorf("an odd text alone = %v", err)
		}
		p.close()
	})
}

func TestPoolEndsItsThreads(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 20 {
		p := newPool(&slowEngine{}, 4, testGauge())
		if err := p.run(t.Context(), "x", []span{{0, 1}}, false, func([]uint32, []uintptr) error { return nil }); err != nil {
			t.Fatal(err)
		}
		p.close()
	}
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("%d goroutines after the pools were closed, %d before", after, before)
	}
}

// A long text must not spread over threads of the encoder's own.
func TestEncodersStartNoThreads(t *testing.T) {
	m := load(t, Options{Model: demoModel(), Timeout: time.Minute})
	if _, err := m.encodeText(t.Context(), nil, strings.Repeat("word1 ", 1<<17), false, 0); err != nil {
		t.Fatal(err)
	}
	names, err := filepath.Glob("/proc/self/task/*/comm")
	if err != nil || len(names) == 0 {
		t.Skip("no /proc here")
	}
	for _, name := range names {
		comm, err := os.ReadFile(name)
		if err == nil && strings.HasPrefix(string(comm), "fastokens") {
			t.Errorf("there is a thread %s", comm)
		}
	}
}
