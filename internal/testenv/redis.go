package testenv

import (
	"bufio"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Redis starts a real redis-server for the test and returns its address.
func Redis(tb testing.TB) string {
	tb.Helper()
	return StartRedis(tb).Addr
}

// RedisServer is a redis-server process that a test may freeze, kill and bring back. Its methods are not safe for
// concurrent use.
type RedisServer struct {
	// Addr is host:port, the same over restarts.
	Addr string

	tb   testing.TB
	dir  string
	args []string
	// sentinel is the configuration file of a server that is a sentinel.
	sentinel string
	cmd      *exec.Cmd
	done     chan struct{}
}

// StartRedis starts a redis-server on a free port of 127.0.0.1 with its own empty folder, no persistence, and args
// appended to its command line (for example "--maxmemory", "50mb"). The test's cleanup ends it.
func StartRedis(tb testing.TB, args ...string) *RedisServer {
	tb.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		Missing(tb, "redis-server is not installed: run scripts/setup.sh")
	}
	s := &RedisServer{
		Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(FreePort(tb))),
		tb:   tb,
		dir:  tb.TempDir(),
		args: args,
	}
	s.start()
	tb.Cleanup(s.Kill)
	return s
}

// start runs the process and waits until it accepts commands.
func (s *RedisServer) start() {
	s.tb.Helper()
	_, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		s.tb.Fatalf("redis address %s: %v", s.Addr, err)
	}
	args := append([]string{"--port", port, "--bind", "127.0.0.1", "--dir", s.dir, "--save", "", "--appendonly", "no"}, s.args...)
	if s.sentinel != "" {
		args = []string{s.sentinel, "--sentinel"}
	}
	s.cmd = exec.Command("redis-server", args...) //nolint:noctx // ended by Kill
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		s.tb.Fatalf("redis-server output: %v", err)
	}
	if err := s.cmd.Start(); err != nil {
		s.tb.Fatalf("start redis-server: %v", err)
	}
	ready := make(chan bool, 1)
	done := make(chan struct{})
	s.done = done
	cmd := s.cmd
	go func() {
		defer close(done)
		var once sync.Once
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if strings.Contains(lines.Text(), "eady to accept connections") || strings.Contains(lines.Text(), "+monitor master") {
				once.Do(func() { ready <- true })
			}
		}
		once.Do(func() { ready <- false })
		_ = cmd.Wait() // killed on purpose: its exit status says nothing
	}()
	select {
	case ok := <-ready:
		if !ok {
			s.tb.Fatalf("redis-server %s ended before it was ready", strings.Join(args, " "))
		}
	case <-time.After(20 * time.Second):
		s.tb.Fatal("redis-server was not ready after 20 s")
	}
}

// Kill ends the process at once, as kill -9 does. A second call does nothing.
func (s *RedisServer) Kill() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill() // it may have ended by itself
	<-s.done
	s.cmd = nil
}

// Restart kills the process if it runs and starts an empty one at the same address.
func (s *RedisServer) Restart() {
	s.tb.Helper()
	s.Kill()
	s.start()
}

// Freeze stops the process with SIGSTOP: connections are accepted, nothing is answered.
func (s *RedisServer) Freeze() {
	s.tb.Helper()
	s.signal(syscall.SIGSTOP)
}

// Thaw ends a Freeze.
func (s *RedisServer) Thaw() {
	s.tb.Helper()
	s.signal(syscall.SIGCONT)
}

func (s *RedisServer) signal(sig os.Signal) {
	s.tb.Helper()
	if s.cmd == nil {
		s.tb.Fatal("redis-server is not running")
	}
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.tb.Fatalf("signal redis-server: %v", err)
	}
}

// FreePort returns a TCP port of 127.0.0.1 that was free a moment ago. It is none of those from which the system takes the near
// ends of connections: a server that a test restarts must find its port free again.
func FreePort(tb testing.TB) int {
	tb.Helper()
	for range 1000 {
		port := 10_000 + rand.IntN(20_000)                                             //nolint:gosec // no secret
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))) //nolint:noctx // a test helper; returns at once
		if err == nil {
			_ = l.Close() // only that it could be had counts
			return port
		}
	}
	tb.Fatal("no free port found")
	return 0
}
