package index

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"prefixgate/internal/block"
	"prefixgate/internal/replica"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

const (
	// maxBranches bounds the runs off the heads' own paths that one round trip of a lookup asks for.
	maxBranches = 16
	// maxRecordRounds bounds the round trips that one batch of records may take to learn what Redis knows.
	maxRecordRounds = 8
)

// Redis is the index that gateways share. Its methods are safe for concurrent use.
type Redis struct {
	client  redis.UniversalClient
	opts    Options
	prefix  string // of every key, with schema version and colon
	mem     *Memory
	near    *lru[nearRun]
	gone    *forgotten
	health  *health
	metrics *metrics
	log     *slog.Logger

	// shortest is the smallest MaxAge that the last lookup asked with, in milliseconds; 0 if it set none.
	shortest atomic.Int64

	queue  chan job
	flush  chan chan struct{}
	cancel context.CancelFunc
	stop   chan struct{}
	once   sync.Once
	wg     sync.WaitGroup
}

// nearRun is what was last read from Redis under a key. The run is never changed, only replaced.
type nearRun struct {
	run   *run   // nil: there was none
	read  int64  // Unix milliseconds
	epoch uint32 // of health at that time
}

// NewRedis returns an index on client, which it neither configures nor closes; see ParseURL for what a client should be
// like. Redis need not be there: until it is, the index answers from what this gateway recorded. Two goroutines run until Close.
func NewRedis(client redis.UniversalClient, opts Options, log *slog.Logger, reg prometheus.Registerer) *Redis {
	opts = opts.withDefaults()
	m := newMetrics(reg)
	m.withRedis(reg)
	gone := &forgotten{}
	ctx, cancel := context.WithCancel(context.Background())
	x := &Redis{
		client:  client,
		opts:    opts,
		prefix:  opts.KeyPrefix + schemaVersion + ":",
		mem:     newMemory(opts, m, gone),
		near:    newLRU[nearRun](opts.NearCacheBytes),
		gone:    gone,
		health:  newHealth(opts.FailureThreshold, opts.ProbeInterval, log, m),
		metrics: m,
		log:     log,
		queue:   make(chan job, opts.QueueLength),
		flush:   make(chan chan struct{}),
		cancel:  cancel,
		stop:    make(chan struct{}),
	}
	m.observe(reg, "memory", &x.mem.runs.bytes, &x.mem.runs.count, opts.MaxMemoryBytes)
	m.observe(reg, "near", &x.near.bytes, &x.near.count, opts.NearCacheBytes)
	x.wg.Go(func() { x.write(ctx) })
	x.wg.Go(func() { x.poll(ctx) })
	return x
}

// Close writes what is queued and forgotten, for at most a second and a half, and ends the index's goroutines. The client stays open.
func (x *Redis) Close() error {
	x.once.Do(func() {
		close(x.stop)
		timer := time.AfterFunc(time.Second, x.cancel)
		x.wg.Wait()
		timer.Stop()
		x.cancel()
		if x.health.usable() {
			ctx, cancel := context.WithTimeout(context.Background(), x.opts.WriteTimeout)
			defer cancel()
			_ = x.exchangeForgotten(ctx) // counted; nobody is left to act on it
		}
	})
	return nil
}

// Match writes into dst[i] how many leading blocks of chain holders[i] is believed to hold. dst must be as long as
// holders. It returns within Options.LookupTimeout or when ctx is done, with at most two round trips and none if the near
// cache is fresh enough. On an error dst holds what this gateway knows by itself; the error is for counting only.
func (x *Redis) Match(ctx context.Context, chain []block.Hash, holders []Holder, dst []int) error {
	now := x.opts.Clock().UnixMilli()
	q := newQuery(chain, holders, now, x.mem.ttl, x.gone)
	defer q.release()
	x.noteAges(holders)
	clear(dst)
	x.mem.match(q)
	q.write(dst)

	v := x.newView(q, now)
	defer v.release()
	var err error
	res := resultNear
	if x.health.usable() {
		v.credit(false)
		if keys := v.unknown(true); len(keys) > 0 {
			res, err = x.ask(ctx, v, keys)
		}
	} else {
		res = resultSkipped
	}
	if res >= resultPartial {
		v.credit(true)
	}
	q.write(dst)
	x.metrics.lookups[res].Inc()
	if err != nil {
		return fmt.Errorf("look up in redis: %w", err)
	}
	return nil
}

// noteAges remembers the smallest MaxAge of a lookup's holders, for refresh.
func (x *Redis) noteAges(holders []Holder) {
	shortest := int64(0)
	for _, h := range holders {
		if age := h.MaxAge.Milliseconds(); age > 0 && (shortest == 0 || age < shortest) {
			shortest = age
		}
	}
	if x.shortest.Load() != shortest {
		x.shortest.Store(shortest)
	}
}

// refresh returns how old a claim in Redis may be, in milliseconds, before a touch is written. Where the replicas keep
// blocks for a short time only, a claim's age has to be known the better.
func (x *Redis) refresh() int64 {
	d := x.opts.RefreshInterval.Milliseconds()
	if age := x.shortest.Load(); age > 0 {
		d = min(d, max(age/8, 1000))
	}
	return d
}

// ask completes the view with what Redis says, in one or two round trips within the lookup's time, and credits it.
func (x *Redis) ask(ctx context.Context, v *view, keys []int) (res result, err error) {
	start := time.Now()
	timed, cancel := context.WithTimeout(ctx, x.opts.LookupTimeout)
	defer cancel()
	answered, err := x.fetch(timed, v, keys)
	v.credit(false)
	res = resultOne
	if err == nil {
		if keys = v.unknown(false); len(keys) > 0 {
			var more int
			more, err = x.fetch(timed, v, keys)
			answered += more
			v.credit(false)
			res = resultTwo
		}
	}
	x.metrics.seconds.Observe(time.Since(start).Seconds())
	failed := err
	if err != nil {
		res = resultFailed
		if answered > 0 {
			// Redis as such is there: a part of a cluster is not, or time ran out on the way.
			res, failed = resultPartial, nil
		}
	}
	// A caller that left or had no time says nothing about Redis.
	if ctx.Err() == nil {
		x.health.outcome(failed)
	}
	return res, err
}

// view is what a lookup knows of the runs on its chain: what it fetched itself, before what the near cache holds.
type view struct {
	x       *Redis
	q       *query
	fresh   int64 // entries of the near cache read before this do not count
	epoch   uint32
	fetched []located
	want    []int
}

type located struct {
	at  int // position in the chain of the run's first block
	run *run
}

var views = sync.Pool{New: func() any { return new(view) }}

func (x *Redis) newView(q *query, now int64) *view {
	v, _ := views.Get().(*view)
	v.x, v.q, v.epoch = x, q, x.health.epoch.Load()
	v.fresh = now - x.opts.NearCacheStaleness.Milliseconds()
	if x.opts.NearCacheStaleness < 0 {
		v.fresh = now + 1
	}
	v.fetched, v.want = v.fetched[:0], v.want[:0]
	return v
}

func (v *view) release() {
	v.x, v.q = nil, nil
	clear(v.fetched)
	views.Put(v)
}

// get returns the run that starts at a position of the chain, nil if there is none. ok is false if that is not known,
// or, unless stale will do, was known too long ago.
func (v *view) get(at int, stale bool) (r *run, ok bool) {
	for _, f := range v.fetched {
		if f.at == at {
			return f.run, true
		}
	}
	h := v.q.chain[at]
	s := v.x.near.of(h)
	s.mu.RLock()
	defer s.mu.RUnlock()
	n := s.m[h]
	if n == nil || !stale && (n.v.read < v.fresh || n.v.epoch != v.epoch) {
		return nil, false
	}
	return n.v.run, true
}

// credit counts the claims on all known runs of the chain, deepest segment first.
func (v *view) credit(stale bool) {
	q := v.q
	clear(q.best)
	for k := len(q.heads) - 1; k >= 0 && !q.settled(); k-- {
		base, end := q.heads[k], q.end(k)
		for base < end {
			r, _ := v.get(base, stale)
			if r == nil {
				break
			}
			shared := r.follow(q.chain, base, end)
			q.credit(r, base, shared)
			base += shared
		}
	}
}

// unknown returns the positions of the runs that have to be asked for. At first these are all heads up to where the chain
// is known to leave what was recorded, and the branches that stale entries make likely. Once the heads are known only
// branches are left, and only those at which a holder was found to arrive.
func (v *view) unknown(first bool) []int {
	q := v.q
	v.want = v.want[:0]
	branches := 0
	heads := false
	arrives := func(at int) bool {
		return heads || slices.Contains(q.best, at)
	}
segments:
	for k, head := range q.heads {
		base, end := head, q.end(k)
		r, ok := v.get(base, false)
		if !ok {
			heads = true
			v.want = append(v.want, base)
			if !first {
				continue
			}
			if r, ok = v.get(base, true); !ok || r == nil {
				continue
			}
		}
		if r == nil {
			break // nobody has this block, so nobody has a later one
		}
		nested := r.nested
		guess := !slices.Contains(v.want, base)
		for {
			shared := r.follow(q.chain, base, end)
			base += shared
			if base >= end {
				continue segments // the path goes on in the next segment
			}
			if shared == r.blocks() {
				if guess {
					break segments // the path was extended if anybody had gone on
				}
				continue segments
			}
			next, ok := v.get(base, false)
			if ok && next == nil {
				if guess {
					break segments
				}
				continue segments
			}
			if !ok {
				break
			}
			r = next
		}
		// The chain goes on in a run that is not known, or not at all.
		if !arrives(base) {
			continue
		}
		for i := len(nested); i >= 0 && branches < maxBranches; i-- {
			at := base
			if i < len(nested) {
				if at = head + int(nested[i]); at <= base || at >= end {
					continue
				}
				if _, ok := v.get(at, false); ok {
					continue
				}
			}
			v.want = append(v.want, at)
			branches++
		}
	}
	return v.want
}

// fetch asks Redis for the runs at the positions, in one round trip, and keeps them in the view and the near cache. It
// returns how many keys were answered. A key that holds something else than ours counts as answered and empty.
func (x *Redis) fetch(ctx context.Context, v *view, positions []int) (answered int, err error) {
	x.metrics.keys.Add(float64(len(positions)))
	now := x.opts.Clock().UnixMilli()
	hashes := make([]block.Hash, len(positions))
	for i, p := range positions {
		hashes[i] = v.q.chain[p]
	}
	err = x.read(ctx, hashes, func(i int, r *run) {
		answered++
		v.fetched = append(v.fetched, located{positions[i], r})
		x.keep(hashes[i], nearRun{r, now, v.epoch})
	})
	return answered, err
}

// read asks for runs in one pipeline and calls got for each key that was answered. It returns the first error among those
// that were not.
func (x *Redis) read(ctx context.Context, keys []block.Hash, got func(i int, r *run)) error {
	pipe := x.client.Pipeline()
	cmds := make([]*redis.StringSliceCmd, len(keys))
	for i, h := range keys {
		cmds[i] = pipe.HVals(ctx, x.keyOf(h))
	}
	_, execErr := pipe.Exec(ctx)
	var first error
	for i, c := range cmds {
		values, err := c.Result()
		if err != nil {
			kind := kindOf(err)
			if kind == failWrongType {
				x.metrics.errs[kind].Inc()
				got(i, nil)
				continue
			}
			if first == nil {
				first = err
				x.metrics.errs[kind].Inc()
			}
			continue
		}
		if execErr != nil && c.Err() == nil && values == nil {
			// The pipeline ended before this command was sent or answered.
			if first == nil {
				first = execErr
				x.metrics.errs[kindOf(execErr)].Inc()
			}
			continue
		}
		got(i, decodeRun(values))
	}
	x.reloadTopology(first)
	return first
}

// reloadTopology lets a cluster client look again which node serves what, after an error that a changed cluster may be the
// reason of. By itself it does so in a pipeline only on a redirection, which a dead master no longer gives. The client keeps to
// a few reloads a second.
func (x *Redis) reloadTopology(err error) {
	c, ok := x.client.(interface{ ReloadState(ctx context.Context) })
	if !ok || err == nil {
		return
	}
	switch kindOf(err) {
	case failNetwork, failTimeout, failCluster, failReadOnly:
		c.ReloadState(context.Background())
	}
}

// keep puts what was read into the near cache.
func (x *Redis) keep(h block.Hash, v nearRun) {
	s := x.near.of(h)
	size := int32(unsafe.Sizeof(node[nearRun]{})) + 24
	if v.run != nil {
		size += v.run.size()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.m[h]
	if n == nil {
		n = &node[nearRun]{key: h}
	} else if n.v.read > v.read {
		return
	}
	n.v = v
	s.putLocked(n, size, v.read, v.read-x.mem.ttl)
}

// Record credits the replica with all blocks of chain, as of now: at once in this gateway's memory, soon in Redis. It copies
// chain and never waits for Redis; a full queue drops and counts.
func (x *Redis) Record(id replica.ID, chain []block.Hash) {
	if len(chain) == 0 {
		return
	}
	holder := holderKey(id)
	now := x.opts.Clock().UnixMilli()
	at := max(now, x.gone.at(holder)+1)
	x.mem.record(holder, chain, at, now)
	x.metrics.records.Inc()
	if !x.health.usable() {
		x.metrics.dropped[dropAway].Inc()
		return
	}
	select {
	case x.queue <- job{holder: holder, at: at, chain: slices.Clone(chain)}:
	default:
		x.metrics.dropped[dropFull].Inc()
	}
}

// Forget makes everything recorded of the replica so far nobody's: at once for this gateway, within Options.PollInterval
// for the others.
func (x *Redis) Forget(id replica.ID) {
	now := x.opts.Clock().UnixMilli()
	x.gone.raise(holderKey(id), now, now-x.mem.ttl)
	x.metrics.forgets.Inc()
}

// Flush waits until everything recorded before the call was written or dropped, and exchanges with Redis what was
// forgotten. It returns ctx's error or that of the exchange.
func (x *Redis) Flush(ctx context.Context) error {
	if err := x.flushQueue(ctx); err != nil {
		return err
	}
	if err := x.exchangeForgotten(ctx); err != nil {
		return fmt.Errorf("exchange forgotten replicas with redis: %w", err)
	}
	return nil
}

func (x *Redis) flushQueue(ctx context.Context) error {
	done := make(chan struct{})
	select {
	case x.flush <- done:
	case <-x.stop:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// poll keeps an eye on Redis and on what other gateways forgot, until ctx is done or the index is closed.
func (x *Redis) poll(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	x.wg.Go(func() {
		select {
		case <-x.stop:
			cancel()
		case <-ctx.Done():
		}
	})
	for {
		wait := x.opts.ProbeInterval
		// Not the clock of the options: this is about real waiting.
		try, done := context.WithTimeout(ctx, time.Second)
		if x.health.probe(try, x.try) {
			wait = x.opts.PollInterval
		}
		done()
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// try finds out whether Redis can be used. While it is being left alone, an answer is not enough: after the connections are
// made it must come within a lookup's time, or a slow Redis would be taken back only to be given up by the next few lookups.
func (x *Redis) try(ctx context.Context) error {
	away := !x.health.usable()
	if err := x.exchangeForgotten(ctx); err != nil || !away {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, x.opts.LookupTimeout)
	defer cancel()
	return x.exchangeForgotten(ctx)
}

// exchangeForgotten reads which replicas other gateways forgot and writes those that this one did. They are fields of one
// small hash; there are as many as replicas were forgotten within a TTL.
func (x *Redis) exchangeForgotten(ctx context.Context) error {
	key := x.prefix + "forgotten"
	now := x.opts.Clock().UnixMilli()
	expired := now - x.mem.ttl
	fields, err := x.client.HGetAll(ctx, key).Result()
	if err != nil {
		kind := kindOf(err)
		x.metrics.errs[kind].Inc()
		if kind == failWrongType {
			return x.client.Unlink(ctx, key).Err()
		}
		return err
	}
	theirs := make(map[uint64]int64, len(fields))
	var old, set []string
	for f, v := range fields {
		at, err := strconv.ParseInt(v, 10, 64)
		if len(f) != 8 || err != nil || at < expired {
			old = append(old, f)
			continue
		}
		holder := binary.LittleEndian.Uint64([]byte(f))
		theirs[holder] = at
		if x.gone.at(holder) < at {
			x.gone.set(holder, at, expired)
		}
	}
	x.gone.each(expired, func(holder uint64, at int64) {
		if theirs[holder] < at {
			set = append(set, encodeHolder(holder), strconv.FormatInt(at, 10))
		}
	})
	if len(old)+len(set) == 0 {
		return nil
	}
	pipe := x.client.Pipeline()
	if len(old) > 0 {
		pipe.HDel(ctx, key, old...)
	}
	if len(set) > 0 {
		pipe.HSet(ctx, key, set)
		pipe.PExpire(ctx, key, x.opts.TTL)
	}
	if _, err := pipe.Exec(ctx); err != nil {
		kind := kindOf(err)
		x.metrics.errs[kind].Inc()
		if !kind.answered() {
			return err
		}
	}
	return nil
}
