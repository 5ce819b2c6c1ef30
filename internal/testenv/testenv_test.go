package testenv

import (
	"bufio"
	"net"
	"testing"
	"time"
)

func ping(t *testing.T, addr string, wait time.Duration) (string, error) {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, wait)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(wait))
	c.Write([]byte("PING\r\n"))
	return bufio.NewReader(c).ReadString('\n')
}

func TestRedisServerCanBeFrozenAndBroughtBack(t *testing.T) {
	s := StartRedis(t)
	if got, err := ping(t, s.Addr, 5*time.Second); err != nil || got != "+PONG\r\n" {
		t.Fatalf("ping a started server = %q, %v", got, err)
	}
	s.Freeze()
	if got, err := ping(t, s.Addr, 200*time.Millisecond); err == nil {
		t.Fatalf("ping a frozen server = %q, want a timeout", got)
	}
	s.Thaw()
	if got, err := ping(t, s.Addr, 5*time.Second); err != nil || got != "+PONG\r\n" {
		t.Fatalf("ping a thawed server = %q, %v", got, err)
	}
	s.Kill()
	if _, err := ping(t, s.Addr, time.Second); err == nil {
		t.Fatal("ping a killed server = no error")
	}
	s.Restart()
	if got, err := ping(t, s.Addr, 5*time.Second); err != nil || got != "+PONG\r\n" {
		t.Fatalf("ping a restarted server = %q, %v", got, err)
	}
}
