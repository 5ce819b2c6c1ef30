package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Elsewhere one stale connection was forgiven and the next one from the pool, closed in the same moment, was a 502.
func TestAPoolOfStaleConnectionsIsPassedOver(t *testing.T) {
	const pool = 3
	var drop atomic.Bool
	var idle sync.WaitGroup
	arrived, release := make(chan struct{}, 10), make(chan struct{})
	addr := raw(t, func(c *net.TCPConn, r *bufio.Reader) {
		for first := true; ; first = false {
			_, body := readRequest(r)
			if body == nil || drop.Load() && !first {
				return
			}
			if string(body) == "wait" {
				arrived <- struct{}{}
				<-release
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
	})
	rg := newRig(t, Options{}, addr, addr)
	for range pool {
		idle.Go(func() { post(t, rg.URL, "wait") })
	}
	for range pool {
		<-arrived
	}
	close(release)
	idle.Wait()
	for range pool {
		rg.outcome(t)
	}
	rg.mu.Lock()
	rg.results = nil
	rg.mu.Unlock()
	drop.Store(true)
	if resp, got := post(t, rg.URL, "x"); resp.StatusCode != http.StatusOK || got != "ok" {
		t.Errorf("answer %d %q, want the replica's", resp.StatusCode, got)
	}
	rg.want(t, ResultOK, ResultOK)
}

// Elsewhere sporadic 502s every few seconds: the replica closes connections that were idle for a while, and the gateway
// sends just then. Here at a hundredth of uvicorn's time.
func TestIdleTimesThatMeetCostNothing(t *testing.T) {
	const idle = 50 * time.Millisecond
	s := httptest.NewUnstartedServer(ok("ok"))
	s.Config.IdleTimeout = idle
	s.Start()
	t.Cleanup(s.Close)
	rg := newRig(t, Options{IdleConnTimeout: 2 * idle}, s.URL) // The wrong way round, on purpose.
	body := strings.Repeat("x", 1<<20)
	for i := range 50 {
		if resp, got := post(t, rg.URL, body); resp.StatusCode != http.StatusOK || got != "ok" {
			t.Fatalf("request %d: %d %q", i, resp.StatusCode, got)
		}
		rg.want(t, ResultOK, ResultOK)
		time.Sleep(idle + time.Duration(i-25)*40*time.Microsecond) // Around the very moment.
	}
}

// On HTTP/2 a write deadline that passes while the replica thinks resets the stream. Elsewhere server-wide timeouts cut
// healthy generations.
func TestAPauseIsNotAStall(t *testing.T) {
	const write = 50 * time.Millisecond
	addr := backend(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			time.Sleep(4 * write)
		}
	})
	for _, h2 := range []bool{false, true} {
		p := New(Options{WriteTimeout: write})
		defer p.Close()
		outcomes := make(chan Outcome, 1)
		front := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			outcomes <- p.Forward(w, r, Call{Body: []byte("{}"), Next: func(n int) (Attempt, bool) { return Attempt{Addr: addr}, n == 0 }})
		}))
		front.EnableHTTP2 = h2
		front.StartTLS()
		defer front.Close()
		resp, err := front.Client().Post(front.URL, "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(got) != "data: 0\n\ndata: 1\n\ndata: 2\n\n" || (resp.ProtoMajor == 2) != h2 {
			t.Errorf("HTTP/2 %v: got %q, %v over %s", h2, got, err, resp.Proto)
		}
		if o := <-outcomes; o.Result != ResultOK {
			t.Errorf("HTTP/2 %v: outcome %s (%v), want ok", h2, o.Result, o.Err)
		}
	}
}

// Elsewhere an error's text quoted what the replica had sent, prompt and all.
func TestErrorsQuoteNoBytes(t *testing.T) {
	for _, answer := range []string{
		"canary\r\n\r\n", "HTTP/1.1 canary OK\r\n\r\n", "HTTP/1.1 200 OK\r\ncanary\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: canary\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: canary\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ncanary",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\ncanary",
	} {
		rg := newRig(t, Options{}, raw(t, func(c *net.TCPConn, r *bufio.Reader) {
			readRequest(r)
			io.WriteString(c, answer)
		}))
		if resp, err := http.Post(rg.URL+"/?canary=1", "application/json", strings.NewReader("canary")); err == nil {
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		if o := rg.outcome(t); o.Err == nil || strings.Contains(o.Err.Error(), "canary") {
			t.Errorf("answer %q: error %v", answer, o.Err)
		}
	}
}

func TestPathAndQueryPassAsTheyAre(t *testing.T) {
	var got string
	rg := newRig(t, Options{}, backend(t, func(_ http.ResponseWriter, r *http.Request) { got = r.RequestURI }))
	for _, target := range []string{"/v1/models/a%2Fb", "/v1/x?a=1;b=%zz&c=+%20", "//v1/../x?", "/v1/m%C3%A9", "/v1/x?a=b?c"} {
		wire(t, rg.Listener.Addr().String(), "GET "+target+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if got != target {
			t.Errorf("replica was asked for %q, want %q", got, target)
		}
	}
}

func TestTrailersAndInterimAnswersPass(t *testing.T) {
	rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Link", "</x>")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Set("Trailer", "X-Sum")
		io.WriteString(w, "body")
		w.Header().Set("X-Sum", "7")
	}))
	hints := 0
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		if code == http.StatusEarlyHints && h.Get("Link") == "</x>" {
			hints++
		}
		return nil
	}})
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, rg.URL, strings.NewReader("{}"))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if hints != 1 || string(body) != "body" || resp.Trailer.Get("X-Sum") != "7" {
		t.Errorf("%d hints, body %q, trailer %v", hints, body, resp.Trailer)
	}
}

// An answer without a Content-Type used to get the one that the server made of its first bytes.
func TestNoContentTypeIsMadeUp(t *testing.T) {
	rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Content-Type"] = nil
		io.WriteString(w, "<html>")
	}))
	resp, err := http.Post(rg.URL, "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if kind, ok := resp.Header["Content-Type"]; ok {
		t.Errorf("Content-Type = %q, want none", kind)
	}
}

// Elsewhere bodies went to the wrong request, or were gone at the second try; and places leaked when clients left.
func TestManyRequestsManyLeave(t *testing.T) {
	live := backend(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		for i := 0; i < len(b); i += 1000 {
			w.Write(b[i:min(i+1000, len(b))])
			w.(http.Flusher).Flush()
		}
	})
	hang := backend(t, func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	dead := closed(t)
	p := New(Options{DialTimeout: watchdog})
	defer p.Close()
	var taken, given atomic.Int64
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		second := live
		if r.Header.Get("X-Hang") != "" {
			second = hang
		}
		o := p.Forward(w, r, Call{Body: body, Next: func(n int) (Attempt, bool) {
			taken.Add(1)
			return Attempt{Addr: []string{dead, second, live}[n], Done: func(Result) { given.Add(1) }}, true
		}})
		if o.Abort {
			panic(http.ErrAbortHandler)
		}
	}))
	client := &http.Client{Transport: &http.Transport{}}
	var all sync.WaitGroup
	for i := range 300 {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 9))
			body := strings.Repeat(fmt.Sprintf("request %d ", i), 1+rng.IntN(2000))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, front.URL, strings.NewReader(body))
			leaves := i%3 == 0
			if leaves {
				if i%2 == 0 {
					req.Header.Set("X-Hang", "1")
				}
				time.AfterFunc(time.Duration(rng.IntN(50))*time.Millisecond, cancel)
			}
			resp, err := client.Do(req)
			if err != nil {
				if !leaves {
					t.Errorf("request %d: %v", i, err)
				}
				return
			}
			defer resp.Body.Close()
			got, err := io.ReadAll(resp.Body)
			if !leaves && (err != nil || string(got) != body) {
				t.Errorf("request %d: %d bytes back (%v), sent %d", i, len(got), err, len(body))
			}
			if !strings.HasPrefix(body, string(got)) {
				t.Errorf("request %d got another's answer", i)
			}
		})
	}
	all.Wait()
	client.CloseIdleConnections()
	front.Close() // Waits for the handlers.
	if taken.Load() != given.Load() {
		t.Errorf("%d places taken, %d given back", taken.Load(), given.Load())
	}
}

// Elsewhere a slow reader's answer piled up in the gateway's memory. Here it slows the replica down.
func TestASlowReaderSlowsTheReplica(t *testing.T) {
	var sent atomic.Int64
	stalled := make(chan struct{})
	rg := newRig(t, Options{WriteTimeout: -1}, raw(t, func(c *net.TCPConn, r *bufio.Reader) {
		readRequest(r)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
		piece := []byte(strings.Repeat("x", 1<<16))
		for {
			c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
			n, err := c.Write(piece)
			sent.Add(int64(n))
			if err != nil {
				close(stalled)
				return
			}
		}
	}))
	c, err := net.Dial("tcp", rg.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
	select {
	case <-stalled:
	case <-time.After(watchdog):
		t.Fatalf("the replica could send %d bytes to nobody", sent.Load())
	}
	// What is under way is in the kernel's buffers of two connections; the gateway itself holds tens of kilobytes.
	if n := sent.Load(); n > 32<<20 {
		t.Errorf("%d bytes are somewhere, though nobody reads", n)
	}
	c.Close()
	if o := rg.outcome(t); o.Result == ResultOK {
		t.Errorf("outcome %s, want a broken one", o.Result)
	}
}
