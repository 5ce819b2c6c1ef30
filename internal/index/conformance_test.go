package index_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/index"
	"prefixgate/internal/index/indextest"
	"prefixgate/internal/replica"
	"prefixgate/internal/testenv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

var (
	_ indextest.Index = (*index.Memory)(nil)
	_ indextest.Index = (*index.Redis)(nil)
)

func TestMemory(t *testing.T) {
	t.Parallel()
	indextest.Run(t, indextest.Backend{
		New: func(_ testing.TB, opts index.Options) indextest.Index {
			return index.NewMemory(opts, prometheus.NewRegistry())
		},
		Rounds: 60,
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

func rebornBackend(client redis.UniversalClient, rounds int) indextest.Backend {
	return indextest.Backend{
		Rounds: rounds,
		New: func(tb testing.TB, opts index.Options) indextest.Index {
			tb.Helper()
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

func pairBackend(client redis.UniversalClient, rounds int) indextest.Backend {
	return indextest.Backend{
		Rounds: rounds,
		New: func(tb testing.TB, opts index.Options) indextest.Index {
			tb.Helper()
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
func nearBackend(client redis.UniversalClient, rounds int) indextest.Backend {
	return indextest.Backend{
		Rounds: rounds,
		New: func(tb testing.TB, opts index.Options) indextest.Index {
			tb.Helper()
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

// open returns a client as a gateway makes it, closed by the test's cleanup.
func open(tb testing.TB, address string) redis.UniversalClient {
	tb.Helper()
	client, err := index.Open(address)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { client.Close() })
	return client
}

func TestRedis(t *testing.T) {
	t.Parallel()
	client := open(t, "redis://"+testenv.Redis(t))
	t.Run("reborn", func(t *testing.T) { indextest.Run(t, rebornBackend(client, 9)) })
	t.Run("pair", func(t *testing.T) { indextest.Run(t, pairBackend(client, 9)) })
	t.Run("near", func(t *testing.T) { indextest.Run(t, nearBackend(client, 9)) })
}

func TestCluster(t *testing.T) {
	t.Parallel()
	c := testenv.StartCluster(t)
	client := open(t, "redis-cluster://"+strings.Join(c.Addrs()[:2], ","))
	t.Run("reborn", func(t *testing.T) { indextest.Run(t, rebornBackend(client, 3)) })
	t.Run("pair", func(t *testing.T) { indextest.Run(t, pairBackend(client, 3)) })
}

func TestSentinel(t *testing.T) {
	t.Parallel()
	r := testenv.StartSentinel(t)
	client := open(t, "redis-sentinel://"+strings.Join(r.Addrs(), ",")+"/"+r.Master)
	indextest.Run(t, pairBackend(client, 3))
}

// TestConnections: every kind of address leads to a Redis that answers.
func TestConnections(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	secret := filepath.Join(dir, "password")
	if err := os.WriteFile(secret, []byte("s3cret@/:\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "redis.sock")
	// The rights that the documentation asks for, and no others.
	rights := []string{"resetkeys", "~pg1:*", "resetchannels", "-@all", "+hgetall", "+hvals", "+hset", "+hdel", "+pexpire", "+unlink", "+client|setname"}
	acl := append([]string{"--user", "gateway", "on", ">s3cret@/:"}, rights...)
	plain := testenv.StartRedis(t, append([]string{"--unixsocket", socket}, acl...)...)
	six := testenv.StartRedis(t, "--bind", "127.0.0.1", "::1")
	tlsAddr, ca := testenv.RedisTLS(t)
	clusterACL := append(slices.Clone(acl), "+cluster|slots")
	cluster := testenv.StartCluster(t, clusterACL...)
	for name, address := range map[string]string{
		"tcp":                "redis://" + plain.Addr + "/3?client_name=test&pool_size=4",
		"resp2":              "redis://" + plain.Addr + "?protocol=2",
		"unix":               "unix://" + socket,
		"ipv6":               "redis://[::1]:" + six.Port(),
		"acl":                "redis://gateway:s3cret%40%2F%3A@" + plain.Addr,
		"acl, password file": "redis://gateway@" + plain.Addr + "?password_file=" + secret,
		"tls":                "rediss://" + tlsAddr + "?ca_file=" + ca,
		"tls, other name":    "rediss://" + tlsAddr + "?server_name=localhost&ca_file=" + ca,
		"tls, unverified":    "rediss://" + tlsAddr + "?skip_verify=true",
		"cluster with acl":   "redis-cluster://gateway@" + cluster.Addrs()[0] + "?password_file=" + secret,
	} {
		t.Run(name, func(t *testing.T) {
			client := open(t, address)
			rng := rand.New(rand.NewPCG(1, 7))
			opts := patient(index.Options{RefreshInterval: time.Millisecond})
			a := newRedis(client, opts)
			defer a.Close()
			chain := indextest.Chain(rng, 500)
			a.Record(indextest.ID(1), chain)
			a.Record(indextest.ID(2), indextest.Fork(rng, chain, 40, 90))
			a.Record(indextest.ID(3), chain)
			a.Forget(indextest.ID(3))
			flush(t, a)
			b := newRedis(client, opts)
			defer b.Close()
			flush(t, b)
			got := make([]int, 4)
			if err := b.Match(t.Context(), chain, indextest.Holders(4), got); err != nil {
				t.Fatal(err)
			}
			if want := []int{0, 500, 40, 0}; !slices.Equal(got, want) {
				t.Errorf("Match = %v, want %v", got, want)
			}
			share := index.NewLoadShare(client, "g", index.LoadOptions{}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			exchanged := 0
			go func() {
				defer close(done)
				share.Run(ctx, func(map[replica.ID]index.Load) {
					if exchanged++; exchanged == 3 {
						cancel()
					}
				})
			}()
			<-done
		})
	}
}

func TestParseURLTellsNoSecrets(t *testing.T) {
	const canary = "c4n4ry"
	for _, address := range []string{
		canary,
		"http://" + canary + ":6379",
		"redis://:" + canary + "/x@host:6379",
		"redis://:" + canary + "%zz@host",
		"redis://" + canary + ":port",
		"redis://host/" + canary,
		"redis://host/1/" + canary,
		"redis://host:6379?" + canary + "=1",
		"redis://host?pool_size=" + canary,
		"redis://host?dial_timeout=" + canary,
		"redis://host?protocol=7",
		"redis://host?a=%" + canary,
		"redis://a,b",
		"redis://::1:6379",
		"redis://[::1",
		"redis://[::1]x",
		"redis://",
		"redis://host:0",
		"unix://relative/path",
		"unix://",
		"redis-sentinel://host:26379",
		"redis-cluster://host/1",
		"redis-cluster://host?db=1",
		"redis://host?skip_verify=true",
		"rediss://host?skip_verify=perhaps",
		"rediss://host?cert_file=x",
		"rediss://host?ca_file=/does/not/exist",
		"redis://host?password_file=/does/not/exist",
	} {
		o, err := index.ParseURL(address)
		if err == nil {
			t.Errorf("ParseURL(%q) = %+v, want an error", address, o)
			continue
		}
		if strings.Contains(err.Error(), canary) {
			t.Errorf("ParseURL(%q): error tells part of the address: %v", address, err)
		}
	}
}

func TestParseURL(t *testing.T) {
	o, err := index.ParseURL("redis-sentinel://u:p%40@a,[fd00::1]:7000,b:1/my%20master/2?sentinel_username=s&pool_size=3&conn_max_lifetime=1m")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(o.Addrs, []string{"a:26379", "[fd00::1]:7000", "b:1"}) || o.MasterName != "my master" || o.DB != 2 ||
		o.Username != "u" || o.Password != "p@" || o.SentinelUsername != "s" || o.PoolSize != 3 || o.ConnMaxLifetime != time.Minute ||
		o.Protocol != 3 || !o.ContextTimeoutEnabled || o.TLSConfig != nil {
		t.Errorf("ParseURL of a sentinel address = %+v", o)
	}
	if o, err := index.ParseURL("redis://host"); err != nil || o.Addrs[0] != "host:6379" {
		t.Errorf("ParseURL without a port = %+v, %v", o, err)
	}
}
