package proxy

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// watchdog bounds the waits of tests whose subject would otherwise hang.
const watchdog = 20 * time.Second

// rig is a gateway reduced to the proxy: it reads the body unless told to stream it, tries addrs in order and notes
// outcomes and attempts' ends.
type rig struct {
	*httptest.Server
	proxy    *Proxy
	addrs    []string
	stream   bool
	header   http.Header
	observer Observer
	outcomes chan Outcome

	mu      sync.Mutex
	results []Result // of attempts, in order
}

func newRig(t *testing.T, opts Options, addrs ...string) *rig {
	t.Helper()
	if err := opts.Validate(); err != nil {
		t.Fatalf("options: %v", err)
	}
	rg := &rig{proxy: New(opts), addrs: addrs, outcomes: make(chan Outcome, 1000)}
	rg.Server = httptest.NewServer(http.HandlerFunc(rg.handle))
	t.Cleanup(func() {
		rg.Close()
		rg.proxy.Close()
	})
	return rg
}

func (rg *rig) handle(w http.ResponseWriter, r *http.Request) {
	var body []byte
	if !rg.stream {
		body, _ = io.ReadAll(r.Body)
		if body == nil {
			body = []byte{}
		}
	}
	o := rg.proxy.Forward(w, r, Call{Body: body, Header: rg.header, Observer: rg.observer, Next: func(n int) (Attempt, bool) {
		if n >= len(rg.addrs) {
			return Attempt{}, false
		}
		return Attempt{Addr: rg.addrs[n], Done: func(res Result) {
			rg.mu.Lock()
			defer rg.mu.Unlock()
			rg.results = append(rg.results, res)
		}}, true
	}})
	rg.outcomes <- o
	if o.Abort {
		panic(http.ErrAbortHandler)
	}
	if !o.Written {
		w.WriteHeader(http.StatusBadGateway)
	}
}

func (rg *rig) outcome(t *testing.T) Outcome {
	t.Helper()
	select {
	case o := <-rg.outcomes:
		return o
	case <-time.After(watchdog):
		t.Fatal("the request did not end")
		return Outcome{}
	}
}

// want compares the outcome and the attempts' ends.
func (rg *rig) want(t *testing.T, result Result, attempts ...Result) Outcome {
	t.Helper()
	o := rg.outcome(t)
	if o.Result != result {
		t.Errorf("outcome = %s (%v), want %s", o.Result, o.Err, result)
	}
	rg.mu.Lock()
	defer rg.mu.Unlock()
	if !slices.Equal(rg.results, attempts) {
		t.Errorf("attempts ended %v, want %v", rg.results, attempts)
	}
	rg.results = nil
	return o
}

func backend(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

// raw is a replica at the level of TCP: each connection is handed to serve.
func raw(t *testing.T, serve func(c *net.TCPConn, r *bufio.Reader)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer c.Close()
				serve(c.(*net.TCPConn), bufio.NewReader(c))
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		conns.Wait()
	})
	return "http://" + l.Addr().String()
}

// readRequest takes one request off the connection.
func readRequest(r *bufio.Reader) (*http.Request, []byte) {
	req, err := http.ReadRequest(r)
	if err != nil {
		return nil, nil
	}
	body, _ := io.ReadAll(req.Body)
	return req, body
}

// closed is an address where nothing listens.
func closed(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	return "http://" + l.Addr().String()
}

func ok(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		io.WriteString(w, text)
	}
}

func post(t *testing.T, url, body string) (*http.Response, string) {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatalf("post: %v", err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("read answer: %v", err)
	}
	return resp, string(got)
}

func TestBodiesPassByteForByte(t *testing.T) {
	// Elsewhere, bodies were decoded and written again: numbers lost digits, keys changed order, audio broke.
	request := `{"seed":9007199254740993, "b":1.0,"a":1e0,  "a":"\ud83d\ude00"}`
	answer := make([]byte, 300_000)
	rand.Read(answer)
	var got []byte
	var length int64
	var encoding []string
	rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, r *http.Request) {
		got, _ = io.ReadAll(r.Body)
		length, encoding = r.ContentLength, r.TransferEncoding
		w.Header().Set("Content-Type", "audio/wav")
		w.Write(answer)
	}))
	for _, chunked := range []bool{false, true} {
		var body io.Reader = strings.NewReader(request)
		if chunked {
			body = struct{ io.Reader }{body}
		}
		resp, err := http.Post(rg.URL+"/v1/audio/speech", "application/json", body)
		if err != nil {
			t.Fatal(err)
		}
		back, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || !bytes.Equal(back, answer) || resp.Header.Get("Content-Type") != "audio/wav" {
			t.Errorf("chunked %v: answer of %d bytes (%v), want the %d sent", chunked, len(back), err, len(answer))
		}
		if string(got) != request || length != int64(len(request)) || encoding != nil {
			t.Errorf("chunked %v: replica got %q, length %d, encoding %v", chunked, got, length, encoding)
		}
		if o := rg.want(t, ResultOK, ResultOK); o.BodyBytes != int64(len(answer)) || o.Status != 200 || o.Attempts != 1 {
			t.Errorf("outcome %+v", o)
		}
	}
}

func TestCompressedAnswersStayCompressed(t *testing.T) {
	// Elsewhere the transport undid gzip behind the gateway's back and the header still said gzip.
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	z.Write([]byte(`{"ok":true}`))
	z.Close()
	var asked string
	rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, r *http.Request) {
		asked = r.Header.Get("Accept-Encoding")
		w.Header().Set("Content-Encoding", "gzip")
		w.Write(zipped.Bytes())
	}))
	for _, accept := range []string{"", "gzip"} {
		req, _ := http.NewRequest(http.MethodPost, rg.URL, strings.NewReader("{}"))
		if accept != "" {
			req.Header.Set("Accept-Encoding", accept)
		}
		resp, err := (&http.Transport{DisableCompression: true}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if asked != accept || resp.Header.Get("Content-Encoding") != "gzip" || !bytes.Equal(body, zipped.Bytes()) {
			t.Errorf("accept %q: replica was asked for %q, answer %q of %d bytes", accept, asked, resp.Header.Get("Content-Encoding"), len(body))
		}
	}
}

func TestEachEventReachesTheClientBeforeTheNextIsSent(t *testing.T) {
	// Elsewhere tokens arrived in lumps. The replica waits for the client's word before it sends on.
	read := make(chan struct{})
	rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 20 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			select {
			case <-read:
			case <-time.After(watchdog):
				return
			}
		}
	}))
	resp, err := http.Post(rg.URL, "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for i := range 20 {
		if !lines.Scan() || lines.Text() != fmt.Sprintf("data: %d", i) || !lines.Scan() {
			t.Fatalf("event %d: %q, %v", i, lines.Text(), lines.Err())
		}
		read <- struct{}{}
	}
	if lines.Scan() || lines.Err() != nil {
		t.Errorf("after the end: %q, %v", lines.Text(), lines.Err())
	}
	rg.want(t, ResultOK, ResultOK)
}

func TestAnotherReplicaTakesOverBeforeTheFirstByte(t *testing.T) {
	// Elsewhere a prefix match pinned requests to a dead replica, or the second try got an empty body.
	for _, c := range []struct {
		name string
		dead string
		want Result
	}{
		{"nothing listens", closed(t), ResultDial},
		{"closes without an answer", raw(t, func(_ *net.TCPConn, r *bufio.Reader) { readRequest(r) }), ResultFailed},
		{"resets without an answer", raw(t, func(c *net.TCPConn, r *bufio.Reader) {
			readRequest(r)
			c.SetLinger(0)
		}), ResultFailed},
		{"dies between the header and the first event", raw(t, func(c *net.TCPConn, r *bufio.Reader) {
			readRequest(r)
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
		}), ResultFailed},
		{"speaks something else", raw(t, func(c *net.TCPConn, r *bufio.Reader) {
			readRequest(r)
			io.WriteString(c, "+PONG\r\n")
		}), ResultFailed},
		{"answers 503", backend(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }), ResultRefused},
		{"has no address", "::", ResultDial},
	} {
		t.Run(c.name, func(t *testing.T) {
			var bodies []string
			live := backend(t, func(w http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				bodies = append(bodies, string(b)+" "+r.Header.Get("X-Prefixgate-Attempt"))
				io.WriteString(w, "alive")
			})
			rg := newRig(t, Options{}, c.dead, live)
			resp, got := post(t, rg.URL, `{"a":1}`)
			if resp.StatusCode != http.StatusOK || got != "alive" || !slices.Equal(bodies, []string{`{"a":1} 2`}) {
				t.Errorf("answer %d %q, live replica got %q", resp.StatusCode, got, bodies)
			}
			if o := rg.want(t, ResultOK, c.want, ResultOK); o.Attempts != 2 || o.Addr != live {
				t.Errorf("outcome %+v", o)
			}
		})
	}
}

func TestAttemptsAreBounded(t *testing.T) {
	asked := 0
	refuse := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		asked++
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(http.StatusServiceUnavailable)
		io.WriteString(w, "busy")
	})
	rg := newRig(t, Options{MaxAttempts: 2}, refuse, refuse, refuse)
	resp, got := post(t, rg.URL, "{}")
	if resp.StatusCode != http.StatusServiceUnavailable || got != "busy" || resp.Header.Get("Retry-After") != "7" || asked != 2 {
		t.Errorf("answer %d %q after %d requests, want the second replica's own 503", resp.StatusCode, got, asked)
	}
	rg.want(t, ResultOK, ResultRefused, ResultOK)
	rg.addrs = []string{closed(t), closed(t), closed(t)}
	post(t, rg.URL, "{}")
	if o := rg.want(t, ResultDial, ResultDial, ResultDial); o.Written || o.Status != 0 || o.Attempts != 2 {
		t.Errorf("outcome %+v, want nothing written", o)
	}
	rg.addrs = nil
	post(t, rg.URL, "{}")
	rg.want(t, ResultNoReplica)
}

func TestEngineErrorsArePassedOnUntouched(t *testing.T) {
	// Elsewhere the engine's 400 was wrapped, lost, retried, or took the replica out of rotation.
	other := 0
	spare := backend(t, func(http.ResponseWriter, *http.Request) { other++ })
	for _, status := range []int{307, 400, 401, 404, 413, 422, 429, 500} {
		body := fmt.Sprintf(`{"error":{"message":"no","code":%d}}`, status)
		rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Retry-After", "3")
			w.Header().Set("Location", "http://elsewhere.invalid/")
			w.WriteHeader(status)
			io.WriteString(w, body)
		}), spare)
		req, _ := http.NewRequest(http.MethodPost, rg.URL, strings.NewReader(`{"stream":true}`))
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != status || string(got) != body || resp.Header.Get("Retry-After") != "3" {
			t.Errorf("status %d: got %d %q", status, resp.StatusCode, got)
		}
		rg.want(t, ResultOK, ResultOK)
	}
	if other != 0 {
		t.Errorf("%d requests were tried again", other)
	}
}

// wire sends a request and returns every byte of the answer until the connection ends.
func wire(t *testing.T, addr, request string) string {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(watchdog))
	io.WriteString(c, request)
	got, err := io.ReadAll(c)
	if errors.Is(err, context.DeadlineExceeded) {
		t.Fatal("the connection was not ended")
	}
	return string(got)
}

func TestAStreamThatBreaksLooksBroken(t *testing.T) {
	// Elsewhere a truncated answer looked complete, was retried with its text doubled, or got a made-up [DONE].
	head := "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	event := "9\r\ndata: 1\n\n\r\n"
	for _, c := range []struct {
		name  string
		serve func(c *net.TCPConn)
	}{
		{"reset", func(c *net.TCPConn) {
			io.WriteString(c, head+event)
			// The reset must not overtake the event.
			time.Sleep(50 * time.Millisecond)
			c.SetLinger(0)
		}},
		{"closed between chunks", func(c *net.TCPConn) { io.WriteString(c, head+event) }},
		{"closed inside a chunk", func(c *net.TCPConn) { io.WriteString(c, head+event+"9\r\ndat") }},
		{"shorter than promised", func(c *net.TCPConn) {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ndata: 1\n\n")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			other := 0
			spare := backend(t, func(http.ResponseWriter, *http.Request) { other++ })
			rg := newRig(t, Options{}, raw(t, func(conn *net.TCPConn, r *bufio.Reader) {
				readRequest(r)
				c.serve(conn)
			}), spare)
			got := wire(t, rg.Listener.Addr().String(), "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
			if !strings.Contains(got, "data: 1\n\n") || strings.Contains(got, "\r\n0\r\n") || strings.Contains(got, "DONE") || strings.Contains(got, "500") {
				t.Errorf("client saw %q, want the event and no end", got)
			}
			if o := rg.want(t, ResultBroken, ResultBroken); !o.Abort || other != 0 {
				t.Errorf("outcome %+v, %d retries", o, other)
			}
		})
	}
}

func TestACleanEndIsRelayedEvenIfEmpty(t *testing.T) {
	rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
	}))
	if resp, got := post(t, rg.URL, "{}"); resp.StatusCode != http.StatusOK || got != "" {
		t.Errorf("answer %d %q", resp.StatusCode, got)
	}
	rg.want(t, ResultOK, ResultOK)
	rg.addrs = []string{backend(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })}
	if resp, _ := post(t, rg.URL, ""); resp.StatusCode != http.StatusNoContent {
		t.Errorf("answer %d, want 204", resp.StatusCode)
	}
	rg.want(t, ResultOK, ResultOK)
	rg.addrs = []string{backend(t, ok("text"))}
	resp, err := http.Head(rg.URL)
	if err != nil || resp.StatusCode != http.StatusOK || resp.ContentLength != 4 {
		t.Errorf("HEAD = %v, %v", resp, err)
	}
	rg.want(t, ResultOK, ResultOK)
}

func TestAClientThatLeavesFreesTheReplica(t *testing.T) {
	// Elsewhere the replica went on generating for nobody, or the request was tried again elsewhere.
	for _, events := range []int{0, 3} {
		t.Run(fmt.Sprintf("after %d events", events), func(t *testing.T) {
			begun, freed := make(chan struct{}), make(chan struct{})
			other := 0
			rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				for range events {
					io.WriteString(w, "data: x\n\n")
					w.(http.Flusher).Flush()
				}
				close(begun)
				<-r.Context().Done()
				close(freed)
			}), backend(t, func(http.ResponseWriter, *http.Request) { other++ }))
			ctx, leave := context.WithCancel(t.Context())
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, rg.URL, strings.NewReader("{}"))
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				if resp, err := http.DefaultClient.Do(req); err == nil {
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			}()
			<-begun
			leave()
			select {
			case <-freed:
			case <-time.After(watchdog):
				t.Fatal("the replica was not freed")
			}
			<-gone
			rg.want(t, ResultClientGone, ResultClientGone)
			if other != 0 {
				t.Errorf("%d requests were tried again", other)
			}
		})
	}
}

func TestTimeoutsAreSeparate(t *testing.T) {
	hang := func(event bool) string {
		return backend(t, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			if event {
				io.WriteString(w, "data: x\n\n")
				w.(http.Flusher).Flush()
			}
			<-r.Context().Done()
		})
	}
	short := 50 * time.Millisecond
	for _, c := range []struct {
		name  string
		opts  Options
		event bool
		want  Result
	}{
		{"first byte", Options{FirstByteTimeout: short}, false, ResultFirstByteTimeout},
		{"total before the first byte", Options{TotalTimeout: short}, false, ResultTotalTimeout},
		{"total after the first byte", Options{TotalTimeout: 40 * short, FirstByteTimeout: watchdog}, true, ResultTotalTimeout},
		{"idle", Options{IdleTimeout: short}, true, ResultIdleTimeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			other := 0
			rg := newRig(t, c.opts, hang(c.event), backend(t, func(http.ResponseWriter, *http.Request) { other++ }))
			resp, err := http.Post(rg.URL, "application/json", strings.NewReader("{}"))
			if err == nil {
				_, err = io.ReadAll(resp.Body)
				resp.Body.Close()
			}
			o := rg.want(t, c.want, c.want)
			if o.Written != c.event || (err != nil) != c.event || other != 0 {
				t.Errorf("outcome %+v, client error %v, %d retries", o, err, other)
			}
		})
	}
	t.Run("first byte, with retry", func(t *testing.T) {
		rg := newRig(t, Options{FirstByteTimeout: short, RetryFirstByteTimeout: true}, hang(false), backend(t, ok("alive")))
		if _, got := post(t, rg.URL, "{}"); got != "alive" {
			t.Errorf("answer %q", got)
		}
		rg.want(t, ResultOK, ResultFirstByteTimeout, ResultOK)
	})
	t.Run("none by default", func(t *testing.T) {
		o := Options{}.withDefaults()
		if o.FirstByteTimeout != 0 || o.IdleTimeout != 0 || o.TotalTimeout != 0 {
			t.Errorf("defaults %+v cut long generations", o)
		}
	})
}

func TestAStaleConnectionIsTriedAgainOnTheSameReplica(t *testing.T) {
	// Elsewhere sporadic 502s: the replica closes an idle connection in the moment it is used again.
	var mu sync.Mutex
	served := 0
	addr := raw(t, func(c *net.TCPConn, r *bufio.Reader) {
		// Answers one request on each connection, then drops it when the next one comes.
		if req, body := readRequest(r); req != nil {
			mu.Lock()
			served++
			mu.Unlock()
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			readRequest(r)
		}
	})
	rg := newRig(t, Options{}, addr)
	body := strings.Repeat("x", 1<<20)
	for i := range 10 {
		if resp, got := post(t, rg.URL, body); resp.StatusCode != http.StatusOK || got != body {
			t.Fatalf("request %d: %d, %d bytes", i, resp.StatusCode, len(got))
		}
		if o := rg.want(t, ResultOK, ResultOK); o.Attempts != 1 {
			t.Errorf("request %d: %d attempts, want 1: the replica is not to blame", i, o.Attempts)
		}
	}
	if served != 10 {
		t.Errorf("the replica served %d requests, want 10", served)
	}
}

func TestHeaders(t *testing.T) {
	// Elsewhere a client stripped the gateway's headers by naming them in Connection, or set those the system trusts.
	var got http.Header
	var host string
	rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, r *http.Request) {
		got, host = r.Header.Clone(), r.Host
		w.Header().Set("X-Prefixgate-Replica", "forged")
		w.Header().Set("Keep-Alive", "timeout=5")
		w.Header().Set("X-Engine", "yes")
	}))
	rg.header = http.Header{"X-Request-Id": {"id-1"}}
	got0 := wire(t, rg.Listener.Addr().String(), "POST http://169.254.169.254/v1/x HTTP/1.1\r\nHost: metadata.internal\r\n"+
		"Connection: close, x-request-id, x-forwarded-for, x-secret\r\nX-Request-Id: client\r\nX-Secret: 1\r\nProxy-Authorization: p\r\nTe: trailers\r\n"+
		"Keep-Alive: 5\r\nX-Forwarded-For: 1.2.3.4\r\nX-Prefixgate-Attempt: 9\r\nAuthorization: Bearer k\r\nX-Custom: c\r\nContent-Length: 2\r\n\r\n{}")
	for name, want := range map[string]string{
		"X-Request-Id": "id-1", "Authorization": "Bearer k", "X-Custom": "c", "X-Forwarded-For": "127.0.0.1",
		"X-Secret": "", "Proxy-Authorization": "", "Te": "", "Keep-Alive": "", "Connection": "", "X-Prefixgate-Attempt": "", "User-Agent": "", "Accept-Encoding": "",
	} {
		if v := got.Get(name); v != want {
			t.Errorf("replica got %s: %q, want %q", name, v, want)
		}
	}
	if host != strings.TrimPrefix(rg.addrs[0], "http://") {
		t.Errorf("replica was addressed as %q", host)
	}
	if strings.Contains(got0, "forged") || strings.Contains(got0, "timeout=5") || !strings.Contains(got0, "X-Engine: yes") {
		t.Errorf("client got %q", got0)
	}
}

func TestForwardedHeadersOfATrustedProxyStay(t *testing.T) {
	var got http.Header
	rg := newRig(t, Options{TrustForwarded: true}, backend(t, func(_ http.ResponseWriter, r *http.Request) { got = r.Header.Clone() }))
	req, _ := http.NewRequest(http.MethodPost, rg.URL, strings.NewReader("{}"))
	req.Header.Set("X-Forwarded-For", "1.2.3.4")
	req.Header.Set("X-Forwarded-Proto", "https")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if f, p := got.Get("X-Forwarded-For"), got.Get("X-Forwarded-Proto"); f != "1.2.3.4, 127.0.0.1" || p != "https" {
		t.Errorf("replica got X-Forwarded-For %q, -Proto %q", f, p)
	}
}

func TestAClientThatStopsReadingFreesTheReplica(t *testing.T) {
	// Elsewhere a stalled client held a replica, and its answer in memory, for ever.
	freed := make(chan struct{})
	rg := newRig(t, Options{WriteTimeout: 100 * time.Millisecond}, backend(t, func(w http.ResponseWriter, r *http.Request) {
		defer close(freed)
		piece := make([]byte, 1<<16)
		for r.Context().Err() == nil {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	}))
	c, err := net.Dial("tcp", rg.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
	select {
	case <-freed:
	case <-time.After(watchdog):
		t.Fatal("the replica was not freed")
	}
	// The server cancels the request's context once a write failed: no replica is to blame.
	rg.want(t, ResultClientStalled, ResultClientGone)
}

func TestAStreamedBodyIsSentOnce(t *testing.T) {
	// Elsewhere uploads lost body, length or authorization on a side path, or were held in memory.
	var mu sync.Mutex
	var got []byte
	var kind string
	live := backend(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		got, kind = b, r.Header.Get("Content-Type")
		io.WriteString(w, "text")
	})
	body := make([]byte, 5<<20)
	rand.Read(body)
	send := func(rg *rig) int {
		resp, err := http.Post(rg.URL, `multipart/form-data; boundary="a b"`, struct{ io.Reader }{bytes.NewReader(body)})
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		io.Copy(io.Discard, resp.Body)
		return resp.StatusCode
	}
	rg := newRig(t, Options{}, closed(t), live)
	rg.stream = true
	if status := send(rg); status != 200 || !bytes.Equal(got, body) || kind != `multipart/form-data; boundary="a b"` {
		t.Errorf("after a refused connection: %d, replica got %d bytes as %q", status, len(got), kind)
	}
	rg.want(t, ResultOK, ResultDial, ResultOK)

	got = nil
	rg = newRig(t, Options{}, raw(t, func(_ *net.TCPConn, r *bufio.Reader) { readRequest(r) }), live)
	rg.stream = true
	if status := send(rg); status != 502 || got != nil {
		t.Errorf("after a broken connection: %d, second replica got %d bytes, want none", status, len(got))
	}
	rg.want(t, ResultFailed, ResultFailed)
}

type recorder struct {
	mu     sync.Mutex
	status int
	body   []byte
}

func (r *recorder) Header(status int, h http.Header) {
	r.status = status
	h.Set("X-Prefixgate-Replica", "r1")
}

func (r *recorder) Chunk(p []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.body = append(r.body, p...)
}

func TestTheObserverSeesWhatTheClientGets(t *testing.T) {
	rg := newRig(t, Options{}, backend(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusCreated)
		for i := range 100 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
		}
	}))
	rec := &recorder{}
	rg.observer = rec
	resp, got := post(t, rg.URL, "{}")
	if rec.status != 201 || string(rec.body) != got || resp.Header.Get("X-Prefixgate-Replica") != "r1" {
		t.Errorf("observer saw %d and %d bytes, client %d and %d", rec.status, len(rec.body), resp.StatusCode, len(got))
	}
}

func TestUpgradesPass(t *testing.T) {
	rg := newRig(t, Options{}, raw(t, func(c *net.TCPConn, r *bufio.Reader) {
		if req, err := http.ReadRequest(r); err != nil || req.Header.Get("Upgrade") != "websocket" {
			return
		}
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		line, _ := r.ReadString('\n')
		io.WriteString(c, "echo "+line)
	}))
	rg.stream = true
	c, err := net.Dial("tcp", rg.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(watchdog))
	io.WriteString(c, "GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("answer %v, %v", resp, err)
	}
	io.WriteString(c, "hello\n")
	if line, err := r.ReadString('\n'); line != "echo hello\n" {
		t.Errorf("got %q, %v", line, err)
	}
	c.Close()
	rg.want(t, ResultOK, ResultOK)
}

func TestConnectionsAreNotLimited(t *testing.T) {
	// Elsewhere a hidden limit queued requests inside the gateway. All of these must be at the replica at once.
	const n = 300
	arrived := make(chan struct{}, n)
	release := make(chan struct{})
	rg := newRig(t, Options{DialTimeout: watchdog}, backend(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		arrived <- struct{}{}
		<-release
		io.WriteString(w, "x")
	}))
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			resp, err := client.Post(rg.URL, "application/json", strings.NewReader("{}"))
			if err != nil {
				t.Errorf("post: %v", err)
				return
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		})
	}
	for i := range n {
		select {
		case <-arrived:
		case <-time.After(watchdog):
			t.Fatalf("only %d of %d requests reached the replica", i, n)
		}
	}
	close(release)
	all.Wait()
}

func TestOptionsNameTheirKeys(t *testing.T) {
	err := Options{DialTimeout: -1, MaxAttempts: -1, MaxIdleConns: -1, RetryStatuses: []int{200}}.Validate()
	for _, key := range []string{"dial_timeout", "max_attempts", "max_idle_conns", "retry_statuses"} {
		if err == nil || !strings.Contains(err.Error(), key+": got") {
			t.Errorf("error %v does not name %s", err, key)
		}
	}
}
