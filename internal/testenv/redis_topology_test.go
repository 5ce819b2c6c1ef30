package testenv

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"strings"
	"testing"
)

func TestClusterServesAllSlotsAndFailsOver(t *testing.T) {
	c := StartCluster(t)
	if len(c.Addrs()) != 6 {
		t.Fatalf("Addrs() = %v, want 6", c.Addrs())
	}
	c.Nodes[0].Kill()
	await(t, "failover", func() bool {
		return strings.Contains(c.Nodes[3].Do("INFO", "replication"), "role:master") &&
			strings.Contains(c.Nodes[3].Do("CLUSTER", "INFO"), "cluster_state:ok")
	})
}

func TestSentinelsReplaceAFailedMaster(t *testing.T) {
	r := StartSentinel(t)
	r.Servers[0].Kill()
	await(t, "failover", func() bool { return strings.Contains(r.Servers[1].Do("INFO", "replication"), "role:master") })
}

func TestRedisTLSIsTrustedThroughItsCertificate(t *testing.T) {
	addr, ca := RedisTLS(t)
	pem, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	c, err := tls.Dial("tcp", addr, &tls.Config{RootCAs: pool})
	if err != nil {
		t.Fatalf("dial with the certificate: %v", err)
	}
	c.Close()
	if c, err := tls.Dial("tcp", addr, &tls.Config{RootCAs: x509.NewCertPool()}); err == nil {
		c.Close()
		t.Error("dial without it = no error")
	}
}
