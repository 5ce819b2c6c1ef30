package replica

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Model is a model that a replica serves, or a LoRA adapter.
type Model struct {
	// ID is the name clients ask for.
	ID string
	// Parent is the base model's name if this is an adapter, else empty.
	Parent string
	// Root is where the engine loaded it from.
	Root string
	// MaxModelLen is the longest context in tokens; 0 if unknown.
	MaxModelLen int
	// Raw is the model's object as the replica lists it.
	Raw json.RawMessage
}

// Snapshot is a replica as seen at one instant.
type Snapshot struct {
	// ID is the replica's identity. Start is 0 until its metrics have been read.
	ID ID
	// Healthy says that it may get requests.
	Healthy bool
	// Up says that it passes its checks. If it is not Healthy all the same, requests have failed on it lately, and it is
	// worth a try only where no other is left.
	Up bool
	// Draining says that it shall get no new ones.
	Draining bool
	// Models is what it serves, adapters included; empty until read. Shared: read only.
	Models []Model
	// BlockTokens is the engine's block size in tokens and NumBlocks its cache's size in blocks, summed over its engines; 0
	// if unknown.
	BlockTokens, NumBlocks int
	// Running and Waiting are the engine's own counts, summed over its engines, as of MetricsAge ago.
	Running, Waiting int
	// KVUsage is the part of the cache in use by running requests, 0 to 1, the mean over its engines; NaN if unknown.
	KVUsage float64
	// MetricsAge is how long ago the metrics were read; 0 if they never were.
	MetricsAge time.Duration
	// MetricsFresh says that Running and Waiting are known and recent enough to be used.
	MetricsFresh bool
	// FillRate is how fast its cache is refilled, in blocks per second; 0 if nothing is being replaced, or unknown.
	FillRate float64
	// InFlight is the number of this gateway's own requests on the replica.
	InFlight int
	// PrefillTokens are the uncached prompt tokens of those that have not seen their first token, and Prefills is their number.
	PrefillTokens int64
	Prefills      int
	// PrefillBegan is when the replica began with the first of them, as far as this gateway saw; zero if it never sent it one.
	PrefillBegan time.Time
	// PrefillRate is the learned prefill speed in tokens per second; 0 while unknown.
	PrefillRate float64
	// LoadedAdapters are the adapters it runs requests of, WaitingAdapters those it will load next. Shared: read only.
	LoadedAdapters, WaitingAdapters []string
	// MaxAdapters is how many adapters fit at a time; 0 if unknown.
	MaxAdapters int
	// Weight is the configured relative capacity, 1 by default.
	Weight float64
}

// members is the list of a fleet at one time. It never changes.
type members struct {
	list   []*instance
	byAddr map[string]*instance
}

// Fleet is the set of replicas. All its methods are safe for concurrent use.
type Fleet struct {
	opts       Options
	log        *slog.Logger
	client     *http.Client
	exposition *exposition
	key        string
	members    atomic.Pointer[members]
	onGone     atomic.Pointer[func(ID)]
	polling    sync.WaitGroup

	mu  sync.Mutex      // Guards changes of members, and the fields below.
	ctx context.Context //nolint:containedctx // Of the running Run; replicas that come later are polled under it.
}

// New makes a fleet of the configured replicas. None is healthy until Run has asked it.
func New(opts Options, log *slog.Logger, reg prometheus.Registerer) (*Fleet, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	opts = opts.withDefaults()
	key, err := readKey(opts.APIKeyFile)
	if err != nil {
		return nil, err
	}
	f := &Fleet{opts: opts, log: log, key: key, exposition: newExposition(opts.MetricNames), client: newClient()}
	f.members.Store(&members{byAddr: map[string]*instance{}})
	if err := f.SetReplicas(opts.Replicas); err != nil {
		return nil, err
	}
	if err := reg.Register(newCollector(f)); err != nil {
		return nil, fmt.Errorf("register replica metrics: %w", err)
	}
	return f, nil
}

// OnGone sets the function that is told of lives that ended: a replica restarted, or was removed from the list. What was
// recorded of that ID is nobody's. fn must be safe for concurrent use and must not block. Set it before Run.
func (f *Fleet) OnGone(fn func(ID)) { f.onGone.Store(&fn) }

func (f *Fleet) tellGone(id ID) {
	if fn := f.onGone.Load(); fn != nil {
		(*fn)(id)
	}
}

// Run polls the replicas until ctx is done, and returns when all its goroutines have ended. It must be called once.
func (f *Fleet) Run(ctx context.Context) error {
	f.mu.Lock()
	if f.ctx != nil {
		f.mu.Unlock()
		return errors.New("replica: Run was called before")
	}
	f.ctx = ctx
	for _, in := range f.members.Load().list {
		f.startLocked(in)
	}
	f.mu.Unlock()
	<-ctx.Done()
	// From here on startLocked starts nothing; what it started before is in the group.
	f.mu.Lock()
	f.mu.Unlock() //nolint:staticcheck // Waits for a SetReplicas under way.
	f.polling.Wait()
	f.client.CloseIdleConnections()
	return nil
}

// startLocked starts to poll in.
func (f *Fleet) startLocked(in *instance) {
	if f.ctx == nil || f.ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithCancel(f.ctx)
	in.stop = cancel
	f.polling.Go(func() { in.pollHealth(ctx) })
	f.polling.Go(func() { in.pollMetrics(ctx) })
}

// SetReplicas makes targets the list of replicas, atomically. Replicas that stay keep their state and take over weight and
// draining; those that are gone are no longer polled, and what they have in flight ends on its own. It fails without any
// effect if a target is wrong.
func (f *Fleet) SetReplicas(targets []Target) error {
	check := Options{Replicas: targets}
	if err := check.Validate(); err != nil {
		return err
	}
	keys := make([]string, len(targets))
	for i, t := range targets {
		keys[i] = f.key
		if t.APIKeyFile != "" {
			key, err := readKey(t.APIKeyFile)
			if err != nil {
				return fmt.Errorf("replicas[%d]: %w", i, err)
			}
			keys[i] = key
		}
	}
	f.mu.Lock()
	old := f.members.Load()
	next := &members{byAddr: make(map[string]*instance, len(targets))}
	var added []*instance
	for i, t := range targets {
		addr, err := CanonicalAddr(t.URL)
		if err != nil {
			panic("BUG: a validated URL is not canonical: " + err.Error())
		}
		in := old.byAddr[addr]
		if in == nil || in.key != keys[i] {
			in = newInstance(f, addr, keys[i], t)
			added = append(added, in)
		} else {
			in.mu.Lock()
			in.draining = t.Draining
			in.weight = t.Weight
			if in.weight == 0 {
				in.weight = 1
			}
			in.mu.Unlock()
		}
		next.list = append(next.list, in)
		next.byAddr[addr] = in
	}
	f.members.Store(next)
	for _, in := range added {
		f.startLocked(in)
	}
	var gone []ID
	for _, in := range old.list {
		if next.byAddr[in.addr] == in {
			continue
		}
		if in.stop != nil {
			in.stop()
		}
		if next.byAddr[in.addr] == nil {
			in.mu.Lock()
			gone = append(gone, ID{in.addr, in.start})
			in.mu.Unlock()
		}
	}
	f.mu.Unlock()
	for _, id := range gone {
		f.log.Info("replica removed", "replica", id.Addr)
		f.tellGone(id)
	}
	return nil
}

// SetDraining takes the replica at addr out for new requests, or back in. It reports whether there is one.
func (f *Fleet) SetDraining(addr string, draining bool) bool {
	in := f.members.Load().byAddr[addr]
	if in == nil {
		return false
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.draining = draining
	return true
}

// AppendSnapshots appends one Snapshot per replica to dst, in the order of the list. It does no I/O and allocates only
// where dst is too small.
func (f *Fleet) AppendSnapshots(dst []Snapshot) []Snapshot {
	now := time.Now()
	for _, in := range f.members.Load().list {
		dst = append(dst, Snapshot{})
		in.snapshot(now, &dst[len(dst)-1])
	}
	return dst
}

// Len returns the number of replicas.
func (f *Fleet) Len() int { return len(f.members.Load().list) }

// WaitProbed returns nil once every replica that is in the list now has been asked for its health, whatever it said, and
// the context's error if that is done first. Replicas removed meanwhile are not waited for.
func (f *Fleet) WaitProbed(ctx context.Context) error {
	for _, in := range f.members.Load().list {
		for waiting := true; waiting; {
			select {
			case <-in.probed:
				waiting = false
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(f.opts.Interval):
				waiting = f.members.Load().byAddr[in.addr] == in
			}
		}
	}
	return nil
}

// Acquire counts a request with so many uncached prompt tokens as sent to the replica at addr, whether that is healthy or
// not. It returns false if there is no such replica any more. The Lease must be released.
func (f *Fleet) Acquire(addr string, prefillTokens int) (*Lease, bool) {
	in := f.members.Load().byAddr[addr]
	if in == nil {
		return nil, false
	}
	return in.acquire(time.Now(), prefillTokens), true
}

// ReportFailure reports a failure on the replica at addr. Where a Lease is at hand its Failed is better: it cannot meet a
// later instance at the same address.
func (f *Fleet) ReportFailure(addr string, kind FailureKind) {
	if in := f.members.Load().byAddr[addr]; in != nil {
		in.failed(time.Now(), kind)
	}
}

// ReportSuccess reports that the replica at addr answered, whatever the status.
func (f *Fleet) ReportSuccess(addr string) {
	if in := f.members.Load().byAddr[addr]; in != nil {
		in.succeeded(time.Now())
	}
}
