package index_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"prefixgate/internal/block"
	"prefixgate/internal/index"
	"prefixgate/internal/index/indextest"
	"prefixgate/internal/testenv"
)

var (
	_ indextest.Index = (*index.Memory)(nil)
	_ indextest.Index = (*index.Redis)(nil)
)

func TestMemory(t *testing.T) {
	indextest.Run(t, indextest.Backend{
		New: func(_ testing.TB, opts index.Options) indextest.Index {
			return index.NewMemory(opts, prometheus.NewRegistry())
		},
		Rounds: 300,
	})
}

// patient are options for tests of what an index answers, not how fast: a busy machine must not turn a lookup into a miss.
func patient(opts index.Options) index.Options {
	opts.LookupTimeout = 10 * time.Second
	opts.WriteTimeout = 10 * time.Second
	return opts
}

func newRedis(client redis.UniversalClient, opts index.Options) *index.Redis {
	return index.NewRedis(client, opts, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
}

func flush(tb testing.TB, x *index.Redis) {
	tb.Helper()
	if err := x.Flush(tb.Context()); err != nil {
		tb.Fatalf("Flush: %v", err)
	}
}

// reborn is a gateway that is replaced whenever the test waits for what was recorded: every answer comes from Redis alone.
type reborn struct {
	*index.Redis
	client redis.UniversalClient
	opts   index.Options
}

func rebornBackend(client redis.UniversalClient) indextest.Backend {
	return indextest.Backend{
		New: func(tb testing.TB, opts index.Options) indextest.Index {
			flushAll(tb, client)
			opts = patient(opts)
			return &reborn{newRedis(client, opts), client, opts}
		},
		Settle: func(tb testing.TB, x indextest.Index) {
			tb.Helper()
			r, _ := x.(*reborn)
			flush(tb, r.Redis)
			if err := r.Close(); err != nil {
				tb.Fatalf("Close: %v", err)
			}
			r.Redis = newRedis(r.client, r.opts)
			flush(tb, r.Redis)
		},
	}
}

// pair is two gateways: one records, the other, which always asks Redis but has old knowledge to guess from, is asked.
type pair struct {
	*index.Redis
	asked *index.Redis
}

func (p pair) Match(ctx context.Context, chain []block.Hash, holders []index.Holder, dst []int) error {
	return p.asked.Match(ctx, chain, holders, dst)
}

func (p pair) Close() error { return errors.Join(p.Redis.Close(), p.asked.Close()) }

func pairBackend(client redis.UniversalClient) indextest.Backend {
	return indextest.Backend{
		New: func(tb testing.TB, opts index.Options) indextest.Index {
			flushAll(tb, client)
			opts = patient(opts)
			p := pair{Redis: newRedis(client, opts)}
			opts.NearCacheStaleness = -1
			p.asked = newRedis(client, opts)
			return p
		},
		Settle: func(tb testing.TB, x indextest.Index) {
			tb.Helper()
			p, _ := x.(pair)
			flush(tb, p.Redis)
			flush(tb, p.asked)
		},
	}
}

// nearBackend is one gateway that remembers nothing itself: what it wrote has to be in the near cache, exactly.
func nearBackend(client redis.UniversalClient) indextest.Backend {
	return indextest.Backend{
		New: func(tb testing.TB, opts index.Options) indextest.Index {
			flushAll(tb, client)
			opts.MaxMemoryBytes = 1
			return newRedis(client, patient(opts))
		},
		Settle: func(tb testing.TB, x indextest.Index) {
			tb.Helper()
			r, _ := x.(*index.Redis)
			flush(tb, r)
		},
	}
}

func flushAll(tb testing.TB, client redis.UniversalClient) {
	tb.Helper()
	var err error
	if c, ok := client.(*redis.ClusterClient); ok {
		err = c.ForEachMaster(context.Background(), func(ctx context.Context, c *redis.Client) error { return c.FlushAll(ctx).Err() })
	} else {
		err = client.FlushAll(context.Background()).Err()
	}
	if err != nil {
		tb.Fatalf("FLUSHALL: %v", err)
	}
}

func TestRedis(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: testenv.Redis(t), ContextTimeoutEnabled: true})
	t.Cleanup(func() { client.Close() })
	t.Run("reborn", func(t *testing.T) { indextest.Run(t, rebornBackend(client)) })
	t.Run("pair", func(t *testing.T) { indextest.Run(t, pairBackend(client)) })
	t.Run("near", func(t *testing.T) { indextest.Run(t, nearBackend(client)) })
}
