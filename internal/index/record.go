package index

import (
	"context"
	"slices"
	"time"

	"prefixgate/internal/block"

	"github.com/redis/go-redis/v9"
)

// job is one record on its way to Redis.
type job struct {
	holder uint64
	at     int64 // Unix milliseconds
	chain  []block.Hash
}

// write takes records from the queue to Redis, in batches, until ctx is done or the index is closed and the queue empty.
func (x *Redis) write(ctx context.Context) {
	w := writer{x: x}
	batch := make([]job, 0, x.opts.BatchSize)
	for {
		batch = batch[:0]
		select {
		case j := <-x.queue:
			batch = append(batch, j)
		case done := <-x.flush:
			for len(x.queue) > 0 {
				w.batch(ctx, x.drain(batch[:0]))
			}
			close(done)
			continue
		case <-x.stop:
			for len(x.queue) > 0 && ctx.Err() == nil {
				w.batch(ctx, x.drain(batch[:0]))
			}
			return
		}
		w.batch(ctx, x.drain(batch))
	}
}

// drain fills batch from the queue without waiting.
func (x *Redis) drain(batch []job) []job {
	for len(batch) < cap(batch) {
		select {
		case j := <-x.queue:
			batch = append(batch, j)
		default:
			return batch
		}
	}
	return batch
}

// writer is the state of the goroutine that writes.
type writer struct {
	x *Redis
	// Redis answers, but refuses writes: nothing is tried until then.
	refusedUntil time.Time
	backoff      time.Duration
}

// draft is a run as it will be once the batch is written.
type draft struct {
	run     *run
	was     *run  // as Redis has it; nil: not at all
	read    int64 // when Redis said what it was made from, Unix milliseconds
	path    bool  // the path is to be written
	nested  bool  // the nested offsets are
	holders []uint64
	skip    bool // Redis did not tell: not to be written
	shared  bool // run belongs to the near cache: clone before the first change
}

// batch writes some records: it learns what Redis has of their chains, as far as the near cache does not know, works out what
// has to change, and sends that in one pipeline.
func (w *writer) batch(ctx context.Context, jobs []job) {
	x := w.x
	if len(jobs) == 0 {
		return
	}
	if !x.health.usable() {
		x.metrics.dropped[dropAway].Add(float64(len(jobs)))
		return
	}
	start := time.Now()
	if start.Before(w.refusedUntil) {
		x.metrics.dropped[dropRefused].Add(float64(len(jobs)))
		return
	}
	ctx, cancel := context.WithTimeout(ctx, x.opts.WriteTimeout)
	defer cancel()
	epoch := x.health.epoch.Load()
	drafts := make(map[block.Hash]*draft)
	now := x.opts.Clock().UnixMilli()
	// Where one master of a cluster is away, the records go to the others.
	if answered, err := w.learn(ctx, jobs, drafts, now, epoch); err != nil && answered == 0 {
		w.failed(len(jobs), err)
		return
	}
	for _, j := range jobs {
		w.apply(j, drafts, now)
	}
	if written, err := w.send(ctx, drafts, epoch); err == nil {
		w.backoff = 0
	} else if kind := kindOf(err); written == 0 || kind == failFull || kind == failReadOnly {
		w.failed(len(jobs), err)
	}
	x.metrics.writeSec.Observe(time.Since(start).Seconds())
}

func (w *writer) failed(jobs int, err error) {
	x := w.x
	switch kind := kindOf(err); kind {
	case failFull, failReadOnly, failLoading:
		// Trying at full speed would only burn both sides' CPU.
		w.backoff = min(max(2*w.backoff, 50*time.Millisecond), time.Second)
		w.refusedUntil = time.Now().Add(w.backoff)
		x.metrics.dropped[dropRefused].Add(float64(jobs))
	default:
		x.metrics.dropped[dropFailed].Add(float64(jobs))
		if !kind.answered() {
			x.health.outcome(err)
		}
	}
}

// learn reads into drafts the runs on the jobs' paths. What the near cache knows is taken from it if it is fresh, or if it
// shows that nothing is to be written. It returns how many runs Redis told and the first error of those it did not, which are
// to be left alone.
func (w *writer) learn(ctx context.Context, jobs []job, drafts map[block.Hash]*draft, now int64, epoch uint32) (answered int, err error) {
	x := w.x
	// A lookup for the same request has just read most of it.
	fresh := now - max(x.opts.NearCacheStaleness, time.Second).Milliseconds()
	known := now - x.refresh()
	for range maxRecordRounds {
		var want []block.Hash
		asked := make(map[block.Hash]bool)
		for _, j := range jobs {
			for head := 0; head < len(j.chain); head = segmentEnd(head) {
				end := min(segmentEnd(head), len(j.chain))
				for base := head; base < end; {
					h := j.chain[base]
					d := drafts[h]
					if d == nil {
						if v, ok := x.nearRun(h, epoch); ok {
							d = &draft{run: v.run, was: v.run, read: v.read, shared: true}
						}
					}
					if d == nil || d.read < fresh && (d.read < known || d.run == nil ||
						!d.run.covers(j.holder, d.run.follow(j.chain, base, end), x.since(j))) {
						if !asked[h] {
							asked[h] = true
							want = append(want, h)
						}
						break
					}
					drafts[h] = d
					if d.run == nil || d.skip {
						break // will be made; nothing of this chain lies beyond it in this segment
					}
					shared := d.run.follow(j.chain, base, end)
					if shared == d.run.blocks() {
						break
					}
					base += shared
				}
			}
		}
		if len(want) == 0 {
			return answered, err
		}
		read := x.opts.Clock().UnixMilli()
		for _, h := range want {
			drafts[h] = &draft{read: read, skip: true}
		}
		failure := x.read(ctx, want, func(i int, r *run) {
			answered++
			drafts[want[i]] = &draft{run: r, was: r, read: read, shared: true}
			x.keep(want[i], nearRun{r, read, epoch})
		})
		if err == nil {
			err = failure
		}
	}
	return answered, err
}

// since returns from when on a claim is young enough for the record not to be written.
func (x *Redis) since(j job) int64 {
	return max(j.at-x.refresh(), x.gone.at(j.holder)+1)
}

// nearRun returns what the near cache holds under a key, however old.
func (x *Redis) nearRun(h block.Hash, epoch uint32) (nearRun, bool) {
	s := x.near.of(h)
	s.mu.RLock()
	defer s.mu.RUnlock()
	n := s.m[h]
	if n == nil || n.v.epoch != epoch {
		return nearRun{}, false
	}
	return n.v, true
}

// apply works one record into the drafts. A run that learn did not get to (forks of forks of forks) ends its segment.
func (w *writer) apply(j job, drafts map[block.Hash]*draft, now int64) {
	since := w.x.since(j)
	expired := now - w.x.mem.ttl
	for head := 0; head < len(j.chain); head = segmentEnd(head) {
		end := min(segmentEnd(head), len(j.chain))
		depth := 0
		for base := head; base < end; depth++ {
			d := drafts[j.chain[base]]
			if d == nil {
				if depth == 0 {
					break
				}
				// Nothing is known to be there; what is, is at most another gateway's of this instant.
				d = &draft{read: now}
				drafts[j.chain[base]] = d
			}
			if d.skip {
				break
			}
			if d.run == nil {
				d.run, d.shared = &run{}, false
				d.run.extend(j.chain, base, end)
				d.path = true
			}
			shared := d.run.follow(j.chain, base, end)
			if shared == d.run.blocks() && shared < end-base {
				d.own()
				d.run.extend(j.chain, base, end)
				d.path = true
				shared = end - base
			}
			if !d.run.covers(j.holder, shared, since) {
				d.own()
				d.run.touch(j.holder, shared, j.at, expired)
				if !slices.Contains(d.holders, j.holder) {
					d.holders = append(d.holders, j.holder)
				}
			}
			if depth >= 2 {
				hd := drafts[j.chain[head]]
				hd.own()
				if hd.run.remember(base - head) {
					hd.nested = true
				}
			}
			base += shared
		}
	}
}

func (d *draft) own() {
	if d.shared {
		d.run, d.shared = d.run.clone(), false
	}
}

// dropped returns the fields of holders whose last claim has expired.
func (d *draft) dropped() []string {
	if d.was == nil {
		return nil
	}
	var fields []string
	for i, c := range d.was.claims {
		same := func(o claim) bool { return o.holder == c.holder }
		if !slices.ContainsFunc(d.run.claims, same) && !slices.ContainsFunc(d.was.claims[:i], same) {
			fields = append(fields, encodeHolder(c.holder))
		}
	}
	return fields
}

// send writes the changed drafts in one pipeline and, as far as that worked, lets the near cache know them. It
// returns how many keys were written and the first error of those that were not.
func (w *writer) send(ctx context.Context, drafts map[block.Hash]*draft, epoch uint32) (written int, err error) {
	x := w.x
	type sent struct {
		h   block.Hash
		d   *draft
		set *redis.IntCmd
		ttl *redis.BoolCmd
	}
	var out []sent
	pipe := x.client.Pipeline()
	// A key outlives its entries' TTL by what a touch may leave unwritten.
	life := x.opts.TTL + x.opts.RefreshInterval
	for h, d := range drafts {
		if !d.path && !d.nested && len(d.holders) == 0 {
			continue
		}
		fields := make([]string, 0, 4+2*len(d.holders))
		if d.path {
			fields = append(fields, fieldPath, encodePath(d.run.path))
		}
		if d.nested {
			fields = append(fields, fieldNested, encodeNested(d.run.nested))
		}
		for _, holder := range d.holders {
			fields = append(fields, encodeHolder(holder), encodeClaims(d.run.claims, holder))
		}
		key := x.keyOf(h)
		if old := d.dropped(); len(old) > 0 {
			pipe.HDel(ctx, key, old...)
		}
		out = append(out, sent{h, d, pipe.HSet(ctx, key, fields), pipe.PExpire(ctx, key, life)})
	}
	if len(out) == 0 {
		return 0, nil
	}
	_, execErr := pipe.Exec(ctx)
	var first error
	var wrong []block.Hash
	for _, s := range out {
		err := s.set.Err()
		if err == nil {
			err = s.ttl.Err()
		}
		if err == nil {
			written++
			x.metrics.written.Inc()
			x.keep(s.h, nearRun{s.d.run, s.d.read, epoch})
			continue
		}
		if kindOf(err) == failWrongType {
			wrong = append(wrong, s.h)
		}
		if first == nil {
			first = err
			x.metrics.errs[kindOf(err)].Inc()
		}
	}
	if len(wrong) > 0 {
		// The prefix is ours: what is not a hash under it is in the way. The next touch writes the run.
		pipe := x.client.Pipeline()
		for _, h := range wrong {
			pipe.Unlink(ctx, x.keyOf(h))
		}
		_, _ = pipe.Exec(ctx) // the next write tells
	}
	if first == nil {
		first = execErr
	}
	x.reloadTopology(first)
	return written, first
}
