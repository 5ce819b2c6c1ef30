package testenv

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Do sends a command to the server with redis-cli and returns its answer without the line's end. An error reply fails the
// test.
func (s *RedisServer) Do(args ...string) string {
	s.tb.Helper()
	out, err := s.Try(args...)
	if err != nil {
		s.tb.Fatal(err)
	}
	return out
}

// Try is Do for a server that may be just starting or changing its role: what goes wrong is returned.
func (s *RedisServer) Try(args ...string) (string, error) {
	host, port, _ := net.SplitHostPort(s.Addr)
	cli := append([]string{"-h", host, "-p", port, "-e"}, args...)
	out, err := exec.Command("redis-cli", cli...).CombinedOutput() //nolint:noctx // a test helper; ends by itself
	if err != nil {
		return "", fmt.Errorf("redis-cli %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimRight(string(out), "\r\n"), nil
}

// Port returns the port of Addr.
func (s *RedisServer) Port() string {
	_, port, _ := net.SplitHostPort(s.Addr)
	return port
}

// await polls until ok or fails the test after half a minute.
func await(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			tb.Fatalf("no %s after 30 s", what)
		}
	}
}

// RedisCluster is a Redis Cluster of six nodes: three masters, Nodes[0] to Nodes[2] at first, with a third of the slots
// each, and a replica of each in the same order.
type RedisCluster struct {
	// Nodes are the servers.
	Nodes []*RedisServer
}

// Addrs returns the addresses of all nodes.
func (c *RedisCluster) Addrs() []string {
	addrs := make([]string, len(c.Nodes))
	for i, n := range c.Nodes {
		addrs[i] = n.Addr
	}
	return addrs
}

// StartCluster starts a Redis Cluster of six nodes, with args appended to each one's command line, and waits until it
// serves all slots. A master that fails is replaced by its replica within about two seconds.
func StartCluster(tb testing.TB, args ...string) *RedisCluster {
	tb.Helper()
	c := &RedisCluster{}
	buses := make([]string, 6)
	for i := range buses {
		buses[i] = strconv.Itoa(FreePort(tb))
		c.Nodes = append(c.Nodes, StartRedis(tb, append([]string{
			"--cluster-enabled", "yes", "--cluster-port", buses[i], "--cluster-node-timeout", "1000",
			"--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1",
		}, args...)...))
	}
	for i, n := range c.Nodes[:3] {
		n.Do("CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(i*16384/3), strconv.Itoa((i+1)*16384/3-1))
	}
	for i, n := range c.Nodes {
		n.Do("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1))
		if i > 0 {
			c.Nodes[0].Do("CLUSTER", "MEET", "127.0.0.1", n.Port(), buses[i])
		}
	}
	for _, n := range c.Nodes {
		await(tb, "cluster of 6 nodes", func() bool {
			return strings.Contains(n.Do("CLUSTER", "INFO"), "cluster_known_nodes:6") && !strings.Contains(n.Do("CLUSTER", "NODES"), "handshake")
		})
	}
	for i, n := range c.Nodes[3:] {
		n.Do("CLUSTER", "REPLICATE", c.Nodes[i].Do("CLUSTER", "MYID"))
	}
	for i, n := range c.Nodes {
		await(tb, "serving cluster", func() bool {
			return strings.Contains(n.Do("CLUSTER", "INFO"), "cluster_state:ok") &&
				strings.Count(n.Do("CLUSTER", "NODES"), "slave") == 3 &&
				(i < 3 || strings.Contains(n.Do("INFO", "replication"), "master_link_status:up"))
		})
	}
	return c
}

// RedisSentinel is a master with one replica, watched by three sentinels that replace the master within about two seconds
// of its failure.
type RedisSentinel struct {
	// Servers are the first master and its replica.
	Servers []*RedisServer
	// Sentinels watch them.
	Sentinels []*RedisServer
	// Master is the name the sentinels know the master by.
	Master string
}

// Addrs returns the addresses of the sentinels.
func (r *RedisSentinel) Addrs() []string {
	addrs := make([]string, len(r.Sentinels))
	for i, n := range r.Sentinels {
		addrs[i] = n.Addr
	}
	return addrs
}

// StartSentinel starts a master, a replica and three sentinels, with args appended to the first two's command lines, and
// waits until the sentinels know each other and the replica.
func StartSentinel(tb testing.TB, args ...string) *RedisSentinel {
	tb.Helper()
	args = append([]string{"--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"}, args...)
	master := StartRedis(tb, args...)
	replica := StartRedis(tb, append([]string{"--replicaof", "127.0.0.1 " + master.Port()}, args...)...)
	r := &RedisSentinel{Servers: []*RedisServer{master, replica}, Master: "affinity"}
	for range 3 {
		s := &RedisServer{
			Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(FreePort(tb))),
			tb:   tb,
			dir:  tb.TempDir(),
		}
		s.sentinel = filepath.Join(s.dir, "sentinel.conf")
		conf := fmt.Sprintf("port %s\nbind 127.0.0.1\ndir %s\nsentinel monitor %s 127.0.0.1 %s 2\n"+
			"sentinel down-after-milliseconds %[3]s 500\nsentinel failover-timeout %[3]s 2000\nsentinel parallel-syncs %[3]s 1\n",
			s.Port(), s.dir, r.Master, master.Port())
		if err := os.WriteFile(s.sentinel, []byte(conf), 0o600); err != nil {
			tb.Fatalf("write sentinel configuration: %v", err)
		}
		s.start()
		tb.Cleanup(s.Kill)
		r.Sentinels = append(r.Sentinels, s)
	}
	for _, s := range r.Sentinels {
		await(tb, "sentinels that know each other", func() bool {
			info := s.Do("INFO", "sentinel")
			return strings.Contains(info, "slaves=1") && strings.Contains(info, "sentinels=3") && strings.Contains(info, "status=ok")
		})
	}
	return r
}

// RedisTLS starts a redis-server that speaks TLS only and returns its address and the file of the certificate to trust, which
// names 127.0.0.1 and localhost.
func RedisTLS(tb testing.TB) (addr, caFile string) {
	tb.Helper()
	dir := tb.TempDir()
	caFile, keyFile := certificate(tb, dir)
	port := strconv.Itoa(FreePort(tb))
	StartRedis(tb, "--tls-port", port, "--tls-cert-file", caFile, "--tls-key-file", keyFile, "--tls-ca-cert-file", caFile, "--tls-auth-clients", "no")
	return net.JoinHostPort("127.0.0.1", port), caFile
}

// certificate writes a self-signed certificate and its key into dir.
func certificate(tb testing.TB, dir string) (certFile, keyFile string) {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatalf("generate key: %v", err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "redis for tests"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames:              []string{"localhost"},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		tb.Fatalf("create certificate: %v", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		tb.Fatalf("encode key: %v", err)
	}
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, b := range map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: cert},
		keyFile:  {Type: "PRIVATE KEY", Bytes: der},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(b), 0o600); err != nil {
			tb.Fatalf("write %s: %v", file, err)
		}
	}
	return certFile, keyFile
}
