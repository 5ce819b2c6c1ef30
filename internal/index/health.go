package index

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
)

// health decides whether Redis may be asked. After a few failures in a row nobody asks but the prober, so that no request
// waits for a Redis that does not answer; a probe that succeeds opens the way again.
type health struct {
	breaker *gobreaker.TwoStepCircuitBreaker[struct{}]
	log     *slog.Logger
	metrics *metrics
	// epoch counts the times Redis was lost. What was known of its contents before the last one may be wrong.
	epoch atomic.Uint32
	// met says that Redis has answered at least once.
	met atomic.Bool

	mu       sync.Mutex
	lost     bool      // Redis is left alone; guarded by mu
	lastErr  error     // guarded by mu
	since    time.Time // when Redis was lost; guarded by mu
	told     time.Time // when an outage was last logged; guarded by mu
	untold   int       // outages since then that were not; guarded by mu
	tellBack bool      // the current outage was logged, so its end is too; guarded by mu
}

// tellEvery is the least time between two logged outages: a Redis that comes and goes fills no log.
const tellEvery = 10 * time.Second

func newHealth(threshold int, probe time.Duration, log *slog.Logger, m *metrics) *health {
	h := &health{log: log, metrics: m}
	h.breaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests:   1,
		Timeout:       probe,
		ReadyToTrip:   func(c gobreaker.Counts) bool { return int(c.ConsecutiveFailures) >= threshold },
		OnStateChange: func(_ string, from, to gobreaker.State) { h.changed(from, to) },
	})
	return h
}

// usable reports whether a request may ask Redis now.
func (h *health) usable() bool { return h.breaker.State() == gobreaker.StateClosed }

// outcome counts what became of one exchange with Redis that usable allowed.
func (h *health) outcome(err error) {
	if err != nil {
		h.mu.Lock()
		h.lastErr = err
		h.mu.Unlock()
	}
	done, refused := h.breaker.Allow()
	if refused != nil {
		return // another one's failure has opened the breaker meanwhile
	}
	done(err)
	h.meet(err)
}

// meet notes the first answer ever. Redis may be lost again by the time this runs, and then the gauge is changed's.
func (h *health) meet(err error) {
	if err != nil || h.met.Swap(true) {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.lost {
		h.metrics.up.Set(1)
	}
}

// probe lets fn try Redis if the breaker wants to know. It reports whether Redis answered.
func (h *health) probe(ctx context.Context, fn func(context.Context) error) bool {
	done, err := h.breaker.Allow()
	if err != nil {
		return false
	}
	err = fn(ctx)
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		err = ctx.Err()
	}
	if err != nil {
		h.mu.Lock()
		h.lastErr = err
		h.mu.Unlock()
	}
	done(err)
	h.meet(err)
	return err == nil
}

func (h *health) changed(from, to gobreaker.State) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	h.lost = to != gobreaker.StateClosed
	switch {
	case from == gobreaker.StateClosed:
		h.metrics.up.Set(0)
		h.epoch.Add(1)
		h.since = now
		if h.tellBack = now.Sub(h.told) >= tellEvery; h.tellBack {
			h.log.Warn("redis does not answer, lookups use this gateway's memory", "outages_not_logged", h.untold, "err", h.lastErr)
			h.told, h.untold = now, 0
		} else {
			h.untold++
		}
	case to == gobreaker.StateClosed:
		h.metrics.up.Set(1)
		// Once more: what was read while Redis was going away is not to be relied on either.
		h.epoch.Add(1)
		if h.tellBack {
			h.log.Info("redis answers again", "away_seconds", now.Sub(h.since).Seconds())
		}
	}
}
