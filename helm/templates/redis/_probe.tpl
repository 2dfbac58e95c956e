{{- define "twostep.redisPing" -}}
[/bin/sh, -c, 'test "$(REDISCLI_AUTH=$REDIS_PASSWORD redis-cli -h 127.0.0.1 ping)" = PONG']
{{- end -}}
